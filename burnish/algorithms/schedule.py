"""Compute the learning rate from the step alone: no scheduler to save or restore.

Equals transformers' schedules of the same names, but `min_lr_ratio` never lifts the warm-up's
start.
"""

from __future__ import annotations

import math

from burnish.config.schema import OptimConfig


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, of `total_steps`.

    With W = `warmup_steps` and m = `min_lr_ratio`, lr · f where f = step / W during warm-up, and
    after it, with p = (step - W) / (`total_steps` - W), at most 1:

    - constant: 1
    - linear: m + (1 - m) (1 - p)
    - cosine: m + (1 - m) (1 + cos πp) / 2
    - wsd (arXiv 2404.06395, section 4): 1, then over the last `decay_steps` steps linearly down to m

    As in transformers, a warm-up's first step is at 0, and the step after the last would end the
    decay. A wsd decay never begins before the warm-up ends.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * step / warmup
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, total_steps - config.decay_steps)
    progress = min(max(step - start, 0) / max(total_steps - start, 1), 1.0)
    if config.schedule == "constant":
        height = 1.0
    elif config.schedule == "cosine":
        height = (1 + math.cos(math.pi * progress)) / 2
    else:
        height = 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)
