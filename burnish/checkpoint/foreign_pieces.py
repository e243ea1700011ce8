"""Parts of another program's tensors, and which parts of the model's checkpoint tensors they are.

Left out: reading them (`burnish.checkpoint.pickled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from burnish.models.names import Region
from burnish.parallel.boxes import Box, intersect
from burnish.parallel.shards import Shard, TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor of the source."""

    name: str
    """As the source calls it, or as the parameter is called that it is."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Which part it is."""
    tensor: Tensor
    """Its elements, mapped."""


def part_of(region: Region, piece: Piece) -> Iterator[Shard]:
    """What a piece of a parameter has of one of its regions: a part of a checkpoint tensor, or nothing."""
    common = intersect(region.box, piece.box)
    if common is None:
        return
    inside = common.relative_to(region.box)
    box = Box(
        tuple(inside.offsets[dim] for dim in region.dims),
        tuple(inside.sizes[dim] for dim in region.dims),
    )
    if region.start:
        box = box.shift(region.start)
    view = piece.tensor[common.relative_to(piece.box).slices].reshape(box.sizes)
    yield Shard(TensorSpec(region.name, region.shape, view.dtype), box, view)
