"""Tensors that are not needed for a while leave the device: their memory is freed, they stay what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from burnish.distributed.collectives import agree
from burnish.distributed.device import synchronize
from burnish.distributed.host_memory import Arena, storage_bytes
from burnish.distributed.layout import Layout


@contextmanager
def parked(
    tensors: Iterable[Tensor], arena: Arena, device: torch.device, layout: Layout
) -> Iterator[None]:
    """Inside the block what these hold on `device` is in the arena, and they must not be used; after it they hold it again, bit for bit.

    Whole storages are freed, so whatever shares one with these is gone as well meanwhile. What numpy
    has seen cannot be freed, and stays: that is so of memory on a CPU alone. Beginning is collective:
    where a rank of `layout` has no room, every rank raises.
    """
    found = {tensor.untyped_storage()._cdata: storage_bytes(tensor) for tensor in tensors}
    here = [
        held
        for held in found.values()
        if held.device.type == device.type
        and held.numel() > 0
        and held.untyped_storage().resizable()
    ]
    with agree(layout):
        away = [arena.take(held.numel()) for held in here]
    asynchronous = device.type == "cuda"
    for host, held in zip(away, here, strict=True):
        host.copy_(held, non_blocking=asynchronous)
    synchronize(device)
    for held in here:
        held.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for host, held in zip(away, here, strict=True):
            held.untyped_storage().resize_(host.numel())
            held.copy_(host, non_blocking=asynchronous)
        synchronize(device)
