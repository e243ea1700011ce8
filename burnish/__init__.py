"""Burnish post-trains language models: supervised fine-tuning and reinforcement learning."""

__version__ = "0.1.0"
