"""Checkpoints, format 1: a Hugging Face model and a resumable training state, safe across crashes."""
