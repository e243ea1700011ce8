"""Shards: pieces of tensors that know their canonical name and their place in the whole tensor.

Names, shapes and dim order are those of the Hugging Face checkpoint. Optimizer state puts a slot
before the name (`exp_avg/model.layers.0...`). To save, load, reshard or publish, an engine only
describes its shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from burnish.boxes.box import Box


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole tensor as a checkpoint knows it."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """Global shape; () for a scalar."""
    dtype: torch.dtype
    """Element type."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The box of a tensor that this process holds."""

    spec: TensorSpec
    """The whole tensor."""
    box: Box
    """Which part of it this is, in global coordinates."""
    tensor: Tensor
    """The elements: a *view* of live memory with shape `box.sizes`. Reading it reads the engine's own memory; writing it writes it."""

    def part(self, box: Box) -> Tensor:
        """Return an inner box, in global coordinates: a view, unless a subclass computes it."""
        return self.tensor if box == self.box else self.tensor[box.relative_to(self.box).slices]


@dataclass(frozen=True, slots=True)
class Publication:
    """This process's pieces of a model, to be read once. Reading them may be collective."""

    changing: Iterable[Shard]
    """What training changes."""
    fixed: Iterable[Shard] = ()
    """What it never changes: whoever has taken it once needs it no more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard without its memory."""

    name: str
    """Canonical name of the tensor."""
    shape: tuple[int, ...]
    """Global shape of the tensor."""
    box: Box
    """Which part of it this is, in global coordinates."""
    dtype: torch.dtype
    """Element type in memory, which may differ from the checkpoint's."""

    @classmethod
    def of(cls, shard: Shard) -> Piece:
        """Describe a shard, with the dtype of its memory."""
        return cls(shard.spec.name, shard.spec.shape, shard.box, shard.tensor.dtype)


class ShardSource(Protocol):
    """A source that fills shards: a model directory, a checkpoint, fresh values."""

    def fill(self, shards: Iterable[Shard]) -> None:
        """Write each of this rank's shards in place, converting to its dtype.

        Raises `MissingError` for an unknown name, and `IncompatibleError` naming the tensor for
        another global shape.
        """
