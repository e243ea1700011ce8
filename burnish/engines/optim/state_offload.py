"""Optimizer slots on the host, in bf16, or both; for a step they come to the device in fp32, some at a time.

Kernels and bits are those of slots on the device; bf16 costs one rounding to nearest after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from burnish.distributed.host_memory import Arena

WAVE = 256 << 20
"""Bytes of slots that are on the device in fp32 at one time, or one weight's."""

Weight = TypeVar("Weight")


def resting_zeros(
    tensor: Tensor, arena: Arena | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Zeros in the shape of a tensor: beside it, or in the arena."""
    if arena is None:
        return torch.zeros_like(tensor, dtype=dtype)
    return arena.take(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape).zero_()


def waves(weights: Iterable[tuple[Weight, int]]) -> list[list[Weight]]:
    """Group weights, given with their slots' bytes in fp32, in order, into waves."""
    found: list[list[Weight]] = []
    size = WAVE
    for weight, own in weights:
        if size + own > WAVE:
            found.append([])
            size = 0
        found[-1].append(weight)
        size += own
    return found


@contextmanager
def on_device(
    states: Iterable[dict[str, Tensor]], slots: Sequence[str], device: torch.device
) -> Iterator[None]:
    """Keep these slots on `device` in fp32 inside the block, and store them again after it.

    Copies are asynchronous on CUDA: call `burnish.distributed.device.synchronize` before the host looks at them.
    """
    resting = [(state, slot, state[slot]) for state in states for slot in slots]
    for state, slot, rested in resting:
        state[slot] = rested.to(device, torch.float32, non_blocking=True, copy=True)
    yield
    for state, slot, rested in resting:
        state[slot] = rested.copy_(state[slot], non_blocking=True)
