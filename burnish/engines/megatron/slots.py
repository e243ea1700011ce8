"""State of Megatron's inner optimizers: moments that exist from the start, may be offloaded or in bf16, and one step count.

torch's AdamW counts steps per weight, the fused ones of TransformerEngine and Apex per group. Left out: fp32 weights on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.optimizer import DistributedOptimizer

from burnish.distributed.device import synchronize
from burnish.distributed.host_memory import Arena
from burnish.engines.optim.adamw import SLOTS
from burnish.engines.optim.state_offload import on_device, resting_zeros, waves


def prepare_slots(
    optimizers: Sequence[DistributedOptimizer], arena: Arena | None, dtype: torch.dtype
) -> None:
    """Make zero moments, so that they can be loaded and saved before the first step; in the arena if there is one."""
    for inner in (optimizer.optimizer for optimizer in optimizers):
        for group in inner.param_groups:
            for weight in group["params"]:
                zeros = {slot: resting_zeros(weight.data, arena, dtype) for slot in SLOTS}
                inner.state[weight] |= zeros
    set_steps(optimizers, 0)


def step_in_waves(optimizers: Sequence[DistributedOptimizer], steps: int) -> None:
    """Step every weight, with offloaded moments, after `steps` steps; gradients are gone afterwards.

    Weights are independent, so the result is that of one step of all.
    """
    for inner in (optimizer.optimizer for optimizer in optimizers):
        weights = [weight for group in inner.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        sizes = (len(SLOTS) * weight.nbytes for weight in weights)
        for wave in waves(zip(zip(weights, gradients, strict=True), sizes, strict=True)):
            for group in inner.param_groups:
                if "step" in group:  # each wave is part of the same step
                    group["step"] = steps
            with on_device([inner.state[weight] for weight, _ in wave], SLOTS, wave[0][0].device):
                for weight, gradient in wave:
                    weight.grad = gradient
                inner.step()
                for weight, _ in wave:
                    weight.grad = None
        for device in {weight.device for weight in weights}:
            synchronize(device)


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
