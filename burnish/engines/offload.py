"""Keep weights, gradients and optimizer slots on the host while the device does not need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from burnish.distributed.collectives import agree
from burnish.distributed.device import synchronize
from burnish.distributed.host_memory import Arena, storage_bytes
from burnish.distributed.layout import Layout

WAVE = 256 << 20
"""Most bytes of fp32 slots on the device at one time. The slots of a single weight may exceed it."""


@contextmanager
def offloaded(
    tensors: Iterable[Tensor], arena: Arena, device: torch.device, layout: Layout
) -> Iterator[None]:
    """Move these tensors' storages from `device` to the arena inside the block, and restore them bit for bit.

    Storages shared with numpy stay. If one rank of `layout` has no room, all raise. Collective.
    """
    distinct = {tensor.untyped_storage()._cdata: storage_bytes(tensor) for tensor in tensors}
    storages = [
        storage
        for storage in distinct.values()
        if storage.device.type == device.type
        and storage.numel() > 0
        and storage.untyped_storage().resizable()
    ]
    with agree(layout):
        copies = [arena.take(storage.numel()) for storage in storages]
    asynchronous = device.type == "cuda"
    for host, storage in zip(copies, storages, strict=True):
        host.copy_(storage, non_blocking=asynchronous)
    synchronize(device)
    for storage in storages:
        storage.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for host, storage in zip(copies, storages, strict=True):
            storage.untyped_storage().resize_(host.numel())
            storage.copy_(host, non_blocking=asynchronous)
        synchronize(device)


def step_in_waves(
    optimizer: Any,
    gradients: Sequence[tuple[Tensor, Tensor | None]],
    slots: Sequence[str],
    steps: int,
) -> None:
    """Step weights by their gradients, in groups, with the result of one step.

    Slots on the host or in bf16 come to the device in fp32, group by group.
    """
    for wave in _waves(gradients, len(slots)):
        device = wave[0][0].device
        pinned = device.type == "cuda"
        for group in optimizer.param_groups:
            if "step" in group:  # fused optimizers count here; each wave is part of the same step
                group["step"] = steps
        entries = [(optimizer.state[weight], slot) for weight, _ in wave for slot in slots]
        stored = [state[slot] for state, slot in entries]
        for (state, slot), stored_slot in zip(entries, stored, strict=True):
            state[slot] = stored_slot.to(device, torch.float32, non_blocking=pinned, copy=True)
        for weight, gradient in wave:
            weight.grad = gradient
        optimizer.step()
        for weight, _ in wave:
            weight.grad = None
        for (state, slot), stored_slot in zip(entries, stored, strict=True):
            state[slot] = stored_slot.copy_(state[slot], non_blocking=pinned)
    for device in {weight.device for weight, _ in gradients}:
        synchronize(device)  # the host may read the slots from here on


def _waves(
    gradients: Iterable[tuple[Tensor, Tensor | None]], slots: int
) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """Group weights whose slots take at most `WAVE` bytes in fp32."""
    wave: list[tuple[Tensor, Tensor | None]] = []
    size = 0
    for weight, gradient in gradients:
        own = slots * weight.nbytes
        if wave and size + own > WAVE:
            yield wave
            wave = []
            size = 0
        wave.append((weight, gradient))
        size += own
    if wave:
        yield wave
