"""Free the device memory of tensors for a while and restore them."""

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
    """Move these tensors' data from `device` to the arena inside the block, and restore it bit for bit.

    Whole storages are freed, so tensors that share one are unusable meanwhile. Memory that numpy has seen cannot be freed. Beginning
    is collective: if a rank of `layout` has no room, every rank raises.
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
