"""Copy a step's contents to host memory that the writer process maps.

Training waits only for this copy. The memory is an unnamed file, shared by its descriptor and kept between saves, so later
copies take no new pages.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.transfer import accelerator_of
from burnish.checkpoint.save import Contents, ModelContents
from burnish.distributed import host_memory

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a shard's elements lie in the memory."""

    spec: TensorSpec
    """The whole tensor."""
    box: Box
    """Which part of it."""
    dtype: torch.dtype
    """Element type in the memory."""
    start: int
    """First byte."""

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.box.elements * self.dtype.itemsize

    def shard(self, memory: Tensor) -> Shard:
        """The shard as a view of the memory."""
        flat = memory[self.start : self.stop].view(self.dtype)
        return Shard(self.spec, self.box, flat.view(self.box.sizes))


@dataclass(frozen=True, slots=True)
class StagedModel:
    """One model of a step without its tensors."""

    weights: Sequence[Slot]
    """Of `ModelContents.weights`."""
    training: Sequence[Slot]
    """Of `ModelContents.training`."""
    write_assets: Callable[[Path], None]
    """The same as in `ModelContents`, and to be sent."""
    whole: frozenset[str]
    """The same as in `ModelContents`."""

    def contents(self, memory: Tensor) -> ModelContents:
        """The model, with shards that are views of the memory."""
        return ModelContents(
            weights=[slot.shard(memory) for slot in self.weights],
            training=[slot.shard(memory) for slot in self.training],
            write_assets=self.write_assets,
            whole=self.whole,
        )


@dataclass(frozen=True, slots=True)
class Staged:
    """The contents of a step without its tensors, which are in a `Memory`: small enough for a message."""

    models: Mapping[str, StagedModel]
    """By role, as in `Contents`."""
    state: Mapping[str, Any]
    """The same as in `Contents`."""
    healthy: bool
    """The same."""
    check_finite: bool
    """The same."""
    split: bool
    """The same."""
    size: int
    """Bytes of memory that it takes."""

    def contents(self, memory: Tensor) -> Contents:
        """The contents, with shards that are views of the memory."""
        return Contents(
            models={role: model.contents(memory) for role, model in self.models.items()},
            state=self.state,
            healthy=self.healthy,
            check_finite=self.check_finite,
            split=self.split,
        )


class Memory:
    """Bytes that are shared by a descriptor and grow when more are asked for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    @classmethod
    def make(cls) -> Memory:
        """New memory, without a name, that goes when its last user has gone."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("burnish-staging", os.MFD_CLOEXEC))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def take(self, size: int, *, pin: bool = False) -> Tensor:
        """Return the first `size` bytes, at the same address as before if they were enough. Raises `OSError` without room.

        `pin` keeps them in place for the accelerator to copy into.
        """
        if size > self._bytes.numel():
            self._release()
            if os.fstat(self.descriptor).st_size < size:
                _allocate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        if pin and not self._pinned:
            self._pinned = host_memory.pin(self._bytes)
        return self._bytes[:size]

    def close(self) -> None:
        """Give it back."""
        self._release()
        os.close(self.descriptor)

    def _release(self) -> None:
        if self._pinned:
            host_memory.unpin(self._bytes)
            self._pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)


def stage(
    contents: Contents, memory: Memory, assets: Mapping[str, Callable[[Path], None]]
) -> Staged:
    """Copy the shards into the memory; they may change when this returns. Raises `OSError` without room.

    `assets`, by role, replace the contents' own `write_assets`.
    """
    models, end = {}, 0
    for role, model in contents.models.items():
        weights, end = _slots(model.weights, end)
        training, end = _slots(model.training, end)
        models[role] = StagedModel(weights, training, assets[role], model.whole)
    shards = [s for model in contents.models.values() for s in [*model.weights, *model.training]]
    slots = [slot for staged in models.values() for slot in [*staged.weights, *staged.training]]
    device = accelerator_of(shards)
    room = memory.take(end, pin=device is not None and device.type == "cuda")
    with torch.no_grad():
        for shard, slot in zip(shards, slots, strict=True):
            slot.shard(room).tensor.copy_(shard.tensor, non_blocking=True)
    if device is not None:
        torch.accelerator.synchronize(device)
    return Staged(
        models=models,
        state=dict(contents.state),
        healthy=contents.healthy,
        check_finite=contents.check_finite,
        split=contents.split,
        size=end,
    )


def _slots(shards: Iterable[Shard], start: int) -> tuple[list[Slot], int]:
    """A place for each shard from a byte on, and where they end."""
    slots = []
    for shard in shards:
        slots.append(Slot(shard.spec, shard.box, shard.tensor.dtype, start))
        start = -(-slots[-1].stop // _ALIGN) * _ALIGN
    return slots, start


def _allocate(descriptor: int, size: int) -> None:
    """Take the pages at once, so that a lack of memory is an error here and no signal later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)
