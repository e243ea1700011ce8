"""Compute the learning rate from the step alone: nothing to save."""

from __future__ import annotations

import math

from burnish.config.schema import OptimConfig
from burnish.config.shares import part_of


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, of `total_steps`.

    With W = `warmup_steps`, of `total_steps` if it is a share, and m = `min_lr_ratio` it is lr · step / W during warm-up. After it, with
    p = (step - W) / (`total_steps` - W), at most 1, it is lr times

    - constant: 1
    - linear: m + (1 - m) (1 - p)
    - cosine: m + (1 - m) (1 + cos πp) / 2
    - wsd (arXiv 2404.06395, section 4): 1, then over the last `decay_steps` steps linearly down to m

    As in transformers, except that m does not lift the warm-up's start.
    """
    warmup = part_of(config.warmup_steps, total_steps)
    if step < warmup:
        return config.peak_lr * step / warmup
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, total_steps - part_of(config.decay_steps, total_steps))
    progress = min(max(step - start, 0) / max(total_steps - start, 1), 1.0)
    if config.schedule == "constant":
        height = 1.0
    elif config.schedule == "cosine":
        height = (1 + math.cos(math.pi * progress)) / 2
    else:
        height = 1 - progress
    return config.peak_lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)
