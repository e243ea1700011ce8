"""Parts of another program's tensors as parts of the model's checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard
from burnish.models.names import Region


@dataclass(frozen=True, slots=True)
class ForeignPiece:
    """A part of a tensor of the source."""

    name: str
    """As the source calls it, or as the parameter is called that it is."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Which part it is."""
    tensor: Tensor
    """Its elements, mapped."""

    def part_of(self, region: Region) -> Iterator[Shard]:
        """Return its part of a region of a parameter, which is part of a checkpoint tensor, or nothing."""
        shard = region.shard_of(self.tensor, self.box)
        if shard is not None:
            yield shard
