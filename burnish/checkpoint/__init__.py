"""Checkpoints, format 1: a Hugging Face model and a resumable training state, safe across crashes.

`manager.Checkpoints` saves into and resumes from a run's `checkpoints/`. `manifest`, `steps` and `retention` load no torch.
"""
