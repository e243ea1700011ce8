"""Merge pieces: which parts of A and B change which checkpoint tensor, and a piece with both merged in.

A fused expert has its own rows of A and every E-th column of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.models.lora.adapter_config import factor_name
from burnish.models.names import Region

_BLOCK_ELEMENTS = 1 << 20
# Of a merged weight at a time in fp32.


@dataclass(frozen=True, slots=True)
class Change:
    """What of an adapter is added to one tensor [rows, columns] of the model's checkpoint."""

    layer: str
    """The layer of PEFT's that has A and B, `model.layers.0.self_attn.q_proj`."""
    row: int = 0
    """The row of B that is for the tensor's first."""
    column: int = 0
    """The column of A that is for the tensor's first."""
    expert: int = 0
    """Which expert the tensor is of."""
    experts: int = 1
    """Experts that A and B are for."""

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of its layer's factors from this tensor's first column and row on: A [r, columns], B [rows, r]."""
        rank = len(a) // self.experts
        own = a[self.expert * rank : (self.expert + 1) * rank]
        return own[:, self.column :], b[self.row :, self.expert :: self.experts]


def changes(plain: Iterable[Region], layers: Mapping[str, tuple[str, int]]) -> dict[str, Change]:
    """Return, by name, an adapter's changes of the checkpoint's tensors.

    `plain` are the regions of the uncut model without it. `layers` maps a parameter to PEFT's layer and its number of experts (1: none).
    """
    found = {}
    for region in plain:
        if region.parameter in layers:
            layer, experts = layers[region.parameter]
            *expert, row, column = region.box.offsets
            found[region.name] = Change(layer, row, column, sum(expert), experts)
    return found


class Gathered:
    """Memory for the columns of A and rows of B of pieces of neighbouring experts, or of one matrix."""

    def __init__(
        self, pieces: Sequence[tuple[Change, Shard]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Take pieces that differ in their expert alone; `shapes` are those of A and B in PEFT's files, by name."""
        change, piece = pieces[0]
        (row, column), (rows, columns) = piece.box.offsets, piece.box.sizes
        names = [factor_name(change.layer, letter) for letter in "AB"]
        a, b = (shapes[name] for name in names)
        rank, numbers = a[0] // change.experts, [each.expert for each, _ in pieces]
        self._first = first = min(numbers)
        self._count = count = max(numbers) + 1 - first
        boxes = (
            Box((first * rank, change.column + column), (count * rank, columns)),
            Box((change.row + row, 0, first), (rows, rank, count)),
        )
        wholes = (a, (b[0], rank, change.experts))
        self.shards = tuple(
            Shard(
                TensorSpec(name, whole, torch.float32),
                box,
                torch.empty(box.sizes, device=piece.tensor.device),
            )
            for name, whole, box in zip(names, wholes, boxes, strict=True)
        )
        """To be filled: of A [E r, in], and of B as [out, r, E] (`by_expert`)."""

    def merged(self, change: Change, piece: Shard, scale: float) -> MergedShard:
        """One of the pieces with its part of both."""
        a, b = (shard.tensor for shard in self.shards)
        here = Change(change.layer, expert=change.expert - self._first, experts=self._count)
        factors = here.factors(a, b.flatten(1))
        return MergedShard(piece.spec, piece.box, piece.tensor, *factors, scale)


def gathered(
    base: Iterable[Shard],
    by_name: Mapping[str, Change],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Gathered]:
    """Return, by name, memory for the factors of the pieces in `base` that an adapter changes; a layer's experts share one."""
    alike: dict[Any, list[tuple[Change, Shard]]] = {}
    for piece in base:
        if change := by_name.get(piece.spec.name):
            key = (change.layer, change.row, change.column, piece.box)
            alike.setdefault(key, []).append((change, piece))
    found: dict[str, Gathered] = {}
    for pieces in alike.values():
        places = Gathered(pieces, shapes)
        found |= {piece.spec.name: places for _, piece in pieces}
    return found


def by_expert(factor: Shard, rank: int) -> Shard:
    """Return a piece of B [out, r E] as [out, r, E], in the same memory; a piece of A unchanged."""
    if ".lora_A." in factor.spec.name:
        return factor
    out, width = factor.spec.shape
    (row, _), (rows, _) = factor.box.offsets, factor.box.sizes
    shape = (rank, width // rank)
    return Shard(
        TensorSpec(factor.spec.name, (out, *shape), factor.spec.dtype),
        Box((row, 0, 0), (rows, *shape)),
        factor.tensor.view(rows, *shape),
    )


@dataclass(frozen=True, slots=True, eq=False)
class MergedShard(Shard):
    """A piece of W that reads as W + s B A; its own memory holds W."""

    a: Tensor
    """Its columns of A, fp32."""
    b: Tensor
    """Its rows of B, fp32."""
    scale: float
    """s."""

    def part(self, box: Box) -> Tensor:
        """See `Shard.part`: in memory of its own, computed in fp32 and rounded once."""
        rows, columns = box.relative_to(self.box).slices
        base, a, b = self.tensor[rows, columns], self.a[:, columns], self.b[rows]
        result = torch.empty_like(base)
        step = max(1, _BLOCK_ELEMENTS // max(1, base.shape[1]))
        for start in range(0, len(base), step):
            block = slice(start, start + step)
            result[block] = torch.addmm(base[block].float(), b[block], a, alpha=self.scale)
        return result
