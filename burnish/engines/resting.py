"""Optimizer slots that rest on the host: they come to the device for a step, some at a time, so that kernels and bits stay the same.

Where they rest is `burnish.parallel.arena`. Left out: what steps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from burnish.parallel.arena import Arena

WAVE = 256 << 20
"""Bytes of slots that are on the device at one time, or one weight's."""

Weight = TypeVar("Weight")


def resting_zeros(tensor: Tensor, arena: Arena | None) -> Tensor:
    """Zeros like the tensor: beside it, or in the arena."""
    if arena is None:
        return torch.zeros_like(tensor)
    return arena.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).zero_()


def waves(weights: Iterable[tuple[Weight, int]]) -> list[list[Weight]]:
    """Weights, given with the bytes of their slots, in order: as many together as have these in a wave."""
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
    """These slots of some weights' states are on `device` inside the block, and rest again after it.

    Copies are asynchronous on CUDA: `burnish.parallel.device.synchronize` before the host looks at them.
    """
    resting = [(state, slot, state[slot]) for state in states for slot in slots]
    for state, slot, host in resting:
        state[slot] = host.to(device, non_blocking=True, copy=True)
    yield
    for state, slot, host in resting:
        state[slot] = host.copy_(state[slot], non_blocking=True)
