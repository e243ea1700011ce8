"""Burnish post-trains language models: supervised fine-tuning and reinforcement learning.

Each name, and torch with it, is imported on first use.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Result": "burnish.api",
    "evaluate": "burnish.api",
    "load_config": "burnish.api",
    "rl": "burnish.api",
    "sft": "burnish.api",
    "BurnishError": "burnish.errors",
    "Engine": "burnish.engines.base",
    "Generator": "burnish.rollout.base",
    "Tracker": "burnish.tracking.trackers",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
