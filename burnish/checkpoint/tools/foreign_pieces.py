"""Parts of another program's tensors, and which parts of the model's checkpoint tensors they are.

Left out: reading them (`burnish.checkpoint.tools.import_pickled`).
"""

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
        """What it has, as a piece of a parameter, of one of the parameter's regions: a part of a checkpoint tensor, or nothing."""
        shard = region.shard_of(self.tensor, self.box)
        if shard is not None:
            yield shard
