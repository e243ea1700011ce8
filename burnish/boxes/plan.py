"""Plan who sends which box to whom, to publish, save, load and reshard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from burnish.boxes.box import Box, intersect, subtract
from burnish.boxes.pieces import Pieces, PieceTable, TensorIndex
from burnish.boxes.table import BoxIndex, BoxTable, Columns, Ints, ranges
from burnish.errors import MissingError


@dataclass(frozen=True, slots=True)
class Move:
    """One box that goes from one rank's piece to another's."""

    source: int
    """Rank that has it, in its piece number `have`."""
    have: int
    target: int
    """Rank that wants it, in its piece number `want`."""
    want: int
    box: Box
    """In global coordinates."""
    dtype: torch.dtype
    """The dtype wanted, in which it travels."""

    @property
    def bytes(self) -> int:
        """Bytes that travel."""
        return self.box.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Moves(Columns):
    """Moves as columns."""

    tensors: TensorIndex
    source: Ints
    have: Ints
    target: Ints
    want: Ints
    boxes: BoxTable
    dtype: Ints

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Move]:
        """Each move as an object."""
        columns = (self.source, self.have, self.target, self.want, self.dtype)
        for row, (source, have, target, want, dtype) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            box = self.boxes.box(row, len(self.tensors.shapes[self.boxes.tensor[row]]))
            yield Move(source, have, target, want, box, self.tensors.dtypes[dtype])

    @property
    def bytes(self) -> Ints:
        """`[rows]`: bytes of each."""
        return self.boxes.elements * self.tensors.itemsizes()[self.dtype]

    def digest(self) -> str:
        """Return a digest that ranks with the same plan share."""
        names = repr((self.tensors.names, self.tensors.dtypes))
        return xxhash.xxh3_128((names + Columns.digest(self)).encode()).hexdigest()


def plan(have: Sequence[PieceTable], want: Sequence[PieceTable]) -> Moves:
    """Cover every wanted element once, in the order of the wanted pieces; the tables are by rank.

    A rank reads its own elements; else holders take turns. Raises `MissingError` for an element that nobody holds, and
    `IncompatibleError` where shapes disagree.
    """
    tensors = TensorIndex()
    held, wanted = tensors.merge(have, want)
    return Cover.of(held, wanted, tensors).moves(wanted.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """Wanted pieces, cut into parts that each lie in one cell; all holders have the whole cell."""

    tensors: TensorIndex
    wanted: Pieces
    want: Ints
    """Per part, the row of `wanted`; ascending."""
    cell: Ints
    """Per part, the cell that it lies in."""
    boxes: BoxTable
    """Per part, its elements."""
    held: Pieces
    """Who holds the cells: a row for each cell and holder, by cell and rank."""
    cell_held: Ints
    """Per row of `held`, the cell."""
    cells: BoxIndex

    @classmethod
    def of(cls, held: Pieces, wanted: Pieces, tensors: TensorIndex) -> Cover:
        """Find the holders of all wanted elements. Raises `MissingError` naming tensor and box."""
        return cls._of_cells(*_cells(held, tensors), wanted, tensors)

    def of_others(self, wanted: Pieces) -> Cover:
        """Find the holders of other elements of the same tensors."""
        return self._of_cells(self.cells, self.held, self.cell_held, wanted, self.tensors)

    @classmethod
    def _of_cells(
        cls,
        cells: BoxIndex,
        holders: Pieces,
        cell_held: Ints,
        wanted: Pieces,
        tensors: TensorIndex,
    ) -> Cover:
        want, cell, boxes = cells.meeting(wanted.boxes)
        covered = np.bincount(want, boxes.elements, minlength=len(wanted)).astype(np.int64)
        lacking = np.flatnonzero(covered != wanted.boxes.elements)
        if len(lacking):
            row = int(lacking[0])
            raise _nobody_has(wanted.boxes, row, boxes.take(want == row), tensors)
        return cls(tensors, wanted, want, cell, boxes, holders, cell_held, cells)

    def holders(self) -> tuple[Ints, Ints]:
        """Return every pair of part and row of `held`."""
        first, count = self._of_cell()
        return np.repeat(np.arange(len(self.cell)), count), ranges(first, count)

    def moves(self, targets: Ints) -> Moves:
        """Move each part from a holder to its target; `targets` has a rank per row of `wanted`."""
        target = targets[self.want]
        first, count = self._of_cell()
        in_turn = first + np.arange(len(first)) % np.maximum(count, 1)
        scale = max(self.held.rank.max(initial=0), targets.max(initial=0)) + 1
        keys = self.cell_held * scale + self.held.rank
        own = np.searchsorted(keys, self.cell * scale + target)
        own = np.minimum(own, len(keys) - 1)
        is_own = keys[own] == self.cell * scale + target if len(keys) else np.zeros(0, bool)
        return self._moves(np.where(is_own, own, in_turn), target)

    @property
    def turns(self) -> int:
        """Return the number of turns after which holders repeat."""
        return int(np.lcm.reduce(np.unique(self._of_cell()[1]), initial=1))

    def in_turn(self, rank: int, world: int, turn: int) -> tuple[Moves, Ints]:
        """Read each part once, for all ranks, from the holder whose `turn` it is; tell which parts all ranks hold.

        Those come from `rank` itself.
        """
        first, count = self._of_cell()
        fresh = np.diff(self.held.rank, prepend=-1) != 0
        fresh |= np.diff(self.cell_held, prepend=-1) != 0  # a rank may hold a cell twice
        ranks = np.append(0, np.cumsum(fresh))
        everywhere = (count == world) & (ranks[first + count] - ranks[first] == world)
        chosen = first + np.where(everywhere, rank, turn % np.maximum(count, 1))
        return self._moves(chosen, np.full(len(chosen), rank)), everywhere.astype(np.int64)

    def _moves(self, chosen: Ints, target: Ints) -> Moves:
        return Moves(
            self.tensors,
            self.held.rank[chosen],
            self.held.index[chosen],
            target,
            self.wanted.index[self.want],
            self.boxes,
            self.wanted.dtype[self.want],
        )

    def _of_cell(self) -> tuple[Ints, Ints]:
        first = np.searchsorted(self.cell_held, self.cell, side="left")
        return first, np.searchsorted(self.cell_held, self.cell, side="right") - first


def _cells(held: Pieces, tensors: TensorIndex) -> tuple[BoxIndex, Pieces, Ints]:
    """Cut held boxes into disjoint cells; return cells, holders, and their cells."""
    cells, held, cell = _distinct(held)
    index = BoxIndex(cells)
    a, b, _ = index.meeting(cells)
    tangled = np.unique(cells.tensor[a[a != b]])
    if len(tangled):
        cells, held, cell = _distinct(_untangled(held, tangled, tensors))
        index = BoxIndex(cells)
    return index, held, cell


def _distinct(held: Pieces) -> tuple[BoxTable, Pieces, Ints]:
    """Return distinct boxes, their holders by box and rank, and the holders' boxes."""
    boxes = held.boxes
    columns = [boxes.tensor, *boxes.offsets.T, *boxes.sizes.T]
    varying = [column for column in columns if len(column) and (column != column[0]).any()]
    order = np.lexsort((held.rank, *varying[::-1]))
    held = held.take(order)
    fresh = np.zeros(len(held), bool)
    fresh[:1] = True
    for column in varying:
        fresh[1:] |= column[order[1:]] != column[order[:-1]]
    return held.boxes.take(fresh), held, np.cumsum(fresh) - 1


def _untangled(held: Pieces, tangled: Ints, tensors: TensorIndex) -> Pieces:
    """Cut `tangled` tensors' pieces until any two are equal or disjoint."""
    mixed = np.isin(held.boxes.tensor, tangled)
    rows, boxes = [], []
    for tensor in tangled.tolist():
        dims = len(tensors.shapes[tensor])
        parts: list[tuple[Box, list[int]]] = []
        for row in np.flatnonzero(held.boxes.tensor == tensor).tolist():
            parts = _split(parts, held.boxes.box(row, dims), row)
        for box, holders in parts:
            rows += holders
            boxes += [(tensor, box)] * len(holders)
    cut = held.take(np.array(rows, np.int64))
    cut = replace(cut, boxes=BoxTable.of(boxes, held.boxes.dims))
    return Pieces.concatenate([held.take(~mixed), cut])


def _split(parts: list[tuple[Box, list[int]]], box: Box, row: int) -> list[tuple[Box, list[int]]]:
    found: list[tuple[Box, list[int]]] = []
    left = [box]
    for part, holders in parts:
        common = intersect(part, box)
        if common is None:
            found.append((part, holders))
            continue
        found += [(rest, holders) for rest in subtract(part, common)]
        found.append((common, [*holders, row]))
        left = [rest for each in left for rest in subtract(each, common)]
    return found + [(rest, [row]) for rest in left]


def _nobody_has(wanted: BoxTable, row: int, found: BoxTable, tensors: TensorIndex) -> MissingError:
    tensor = int(wanted.tensor[row])
    name, shape = tensors.names[tensor], tensors.shapes[tensor]
    want = wanted.box(row, len(shape))
    left = [want]
    for part in range(len(found)):
        box = found.box(part, len(shape))
        left = [rest for each in left for rest in subtract(each, box)]
    return MissingError(
        f"no rank holds all of tensor {name}",
        have=f"nobody holds offsets {list(left[0].offsets)}, sizes {list(left[0].sizes)}",
        want=f"offsets {list(want.offsets)}, sizes {list(want.sizes)} of {list(shape)}",
    )
