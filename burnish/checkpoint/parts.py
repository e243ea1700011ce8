"""Which elements lie in which block, and which rank has the care of which block.

Tables over all blocks of a step, as there may be hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burnish.boxes.box import Box
from burnish.boxes.pieces import Described, Pieces, TensorIndex
from burnish.boxes.table import BoxTable, Ints, flat_ranges, intersections, strides
from burnish.checkpoint.blocks import Block, PlannedFile
from burnish.checkpoint.dtypes import BY_NAME

_FAVOURITES = 8  # ranks that are considered for a block before any that has room


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part lies."""

    slot: int
    """Index of the block among those of its rank."""
    start: int
    """First byte, counted from the start of the block."""
    box: Box
    """Which elements of its tensor, in global coordinates."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Boxes of tensors that lie in one block each and are contiguous there, by block and place in it."""

    tensors: TensorIndex
    """What the numbers of tensors and dtypes mean."""
    pieces: Pieces
    """The boxes; `index` is the row and `rank` is 0."""
    block: Ints
    """Index among the blocks."""
    start: Ints
    """First byte, counted from the start of the block."""

    @classmethod
    def of(
        cls, files: Sequence[PlannedFile], blocks: Sequence[Block], tensors: TensorIndex
    ) -> Parts:
        """The parts of those tensors of the files that `tensors` knows by key."""
        entries = _Entries.of(files, tensors)
        ends = np.array([(b.file, b.start, b.stop) for b in blocks], np.int64).reshape(-1, 3)
        in_block, entry, both = intersections(
            _spans(ends[:, 0], ends[:, 1], ends[:, 2]),
            _spans(entries.file, entries.begin, entries.end),
        )
        begin, itemsize = entries.begin[entry], entries.itemsize[entry]
        first = (both.offsets[:, 0] - begin) // itemsize
        last = first + both.sizes[:, 0] // itemsize
        shapes = tensors.shape_table()[entries.tensor[entry]]
        row, offsets, sizes = flat_ranges(shapes, first, last)
        entry, in_block = entry[row], in_block[row]
        flat = (offsets * strides(shapes)[row]).sum(axis=1)
        start = begin[row] + flat * itemsize[row] - ends[in_block, 1]
        order = np.lexsort((start, in_block))
        boxes = BoxTable(entries.tensor[entry], offsets, sizes).take(order)
        numbers, dtype = np.arange(len(order)), entries.dtype[entry][order]
        pieces = Pieces(boxes, np.zeros_like(numbers), numbers, dtype)
        return cls(tensors, pieces, in_block[order], start[order])

    def places(self, slots: Ints) -> dict[int, Place]:
        """Where the parts lie whose block has a slot: its index among a rank's blocks, by block; -1 for none."""
        boxes, found = self.pieces.boxes, {}
        for part in np.flatnonzero(slots[self.block] >= 0).tolist():
            box = boxes.box(part, len(self.tensors.shapes[boxes.tensor[part]]))
            found[part] = Place(int(slots[self.block[part]]), int(self.start[part]), box)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """Tensors in files as a table."""

    file: Ints
    begin: Ints
    end: Ints
    itemsize: Ints
    tensor: Ints
    dtype: Ints

    @classmethod
    def of(cls, files: Sequence[PlannedFile], tensors: TensorIndex) -> _Entries:
        rows: list[tuple[int, int, int]] = []
        described: list[Described] = []
        for index, file in enumerate(files):
            for entry in file.entries:
                key = f"{file.tensor_set}/{entry.name}"
                if key in tensors:
                    rows.append((index, entry.begin, entry.end))
                    described.append((key, entry.shape, BY_NAME[entry.dtype]))
        table = np.array(rows, np.int64).reshape(-1, 3)
        tensor, dtype = tensors.add(described, "on disk")
        itemsize = tensors.itemsizes()[dtype]
        return cls(table[:, 0], table[:, 1], table[:, 2], itemsize, tensor, dtype)


def _spans(file: Ints, begin: Ints, end: Ints) -> BoxTable:
    """Ranges of bytes of files, as boxes of one dim."""
    return BoxTable(file, begin[:, None], (end - begin)[:, None])


def owners(block: Ints, rank: Ints, size: Ints, blocks: int, world: int) -> Ints:
    """Which rank has the care of each of so many blocks: one with the most bytes of it, and all with as many blocks.

    A row says that so many bytes of a block are at a rank, or wanted there. Blocks without a row go
    to whoever has room; so do those whose favourites have none left.
    """
    pair, place = np.unique(block * world + rank, return_inverse=True)
    total = np.bincount(place, size).astype(np.int64) if len(pair) else np.zeros(0, np.int64)
    block, rank = np.divmod(pair, world)
    order = np.lexsort(((rank - block) % world, -total, block))  # among equals, take turns
    begins = np.searchsorted(block[order], np.arange(blocks + 1)).tolist()
    favourites = rank[order].tolist()
    quota = -(-blocks // world)
    load, free, found = [0] * world, 0, []
    for number in range(blocks):
        first, last = begins[number], begins[number + 1]
        liked = favourites[first : min(last, first + _FAVOURITES)]
        owner = next((each for each in liked if load[each] < quota), -1)
        while owner < 0:
            owner = free if load[free] < quota else -1
            free += owner < 0
        load[owner] += 1
        found.append(owner)
    return np.array(found, np.int64)


def owners_by_disk(
    block: Ints, rank: Ints, size: Ints, disk_of_block: Ints, disk_of_rank: Ints
) -> Ints:
    """The same where a block may be a rank's only that has its disk, by disk."""
    if not disk_of_rank.any():  # there is one
        return owners(block, rank, size, len(disk_of_block), len(disk_of_rank))
    found = np.empty_like(disk_of_block)
    for disk in np.unique(disk_of_block):
        blocks, ranks = (np.flatnonzero(of == disk) for of in (disk_of_block, disk_of_rank))
        rows = (disk_of_block[block] == disk) & (disk_of_rank[rank] == disk)
        within = (np.searchsorted(blocks, block[rows]), np.searchsorted(ranks, rank[rows]))
        found[blocks] = ranks[owners(*within, size[rows], len(blocks), len(ranks))]
    return found


def slots_of(owner: Ints) -> Ints:
    """Per block, its index among the blocks of its owner."""
    order = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[order], owner[order])
    found = np.empty_like(owner)
    found[order] = np.arange(len(owner)) - first
    return found
