"""Shards: pieces of tensors with their canonical name and their place.

Names, shapes and dim order are the Hugging Face checkpoint's. Optimizer state has its slot in front (`exp_avg/NAME`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from burnish.boxes.box import Box


class TensorSpec(NamedTuple):
    """A whole tensor; its shape is () for a scalar."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The box of a tensor that this process holds."""

    spec: TensorSpec
    box: Box
    """In global coordinates."""
    tensor: Tensor
    """The elements: a *view* of the engine's own memory, with shape `box.sizes`."""

    def part(self, box: Box) -> Tensor:
        """Return an inner box's elements: a view, unless a subclass computes them."""
        return self.tensor if box == self.box else self.tensor[box.relative_to(self.box).slices]

    def checksum(self) -> str:
        """Return the xxh3_128 of the elements' bytes in C order."""
        flat = self.tensor.detach().contiguous().cpu().view(-1)
        return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def renamed(shard: Shard, names: Mapping[str, str]) -> Shard:
    """Return a shard under the name that `names` has for its weight, if any; a slot stays in front."""
    slot, slash, weight = shard.spec.name.rpartition("/")
    if weight not in names:
        return shard
    return replace(shard, spec=shard.spec._replace(name=f"{slot}{slash}{names[weight]}"))


@dataclass(frozen=True, slots=True)
class Publication:
    """This process's pieces of a model, to be read once. A piece may be a view; it is valid until the next one."""

    changing: Iterable[Shard]
    """Weights that training changes."""
    fixed: Iterable[Shard] = ()
    """Weights that training never changes. The receiver takes them once."""
    anew: bool = False
    """Whether the receiver must take `fixed` again. It then reads `fixed` before `changing`."""


class ShardSource(Protocol):
    """A source that fills shards: a model directory, a checkpoint."""

    def fill(self, shards: Iterable[Shard]) -> None:
        """Write each shard in place, converting to its dtype. Raises `MissingError` for an unknown name, `IncompatibleError`
        for another shape.
        """
