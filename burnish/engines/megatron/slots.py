"""The state of Megatron's inner optimizers: moments that exist from the start, and how many steps were taken.

torch's AdamW counts steps beside each weight, the fused ones of TransformerEngine and Apex in each
group of weights; here that is one number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.optimizer import DistributedOptimizer


def prepare_slots(optimizers: Sequence[DistributedOptimizer]) -> None:
    """Make moments of zeros, so that they can be loaded and saved before the first step."""
    for optimizer in optimizers:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    set_steps(optimizers, 0)


def set_steps(optimizers: Sequence[DistributedOptimizer], steps: int) -> None:
    """Say how many steps were taken; Adam's bias correction runs on it."""
    for inner in (optimizer.optimizer for optimizer in optimizers):
        is_torch = isinstance(inner, torch.optim.AdamW)
        for group in inner.param_groups:
            if not is_torch:
                group["step"] = steps
                continue
            on_device = group["fused"] or group["capturable"]
            for weight in group["params"]:
                device = weight.device if on_device else None
                count = torch.tensor(float(steps), dtype=torch.float32, device=device)
                inner.state[weight]["step"] = count
