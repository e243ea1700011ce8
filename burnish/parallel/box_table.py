"""Many boxes at once, as arrays: what `burnish.parallel.boxes` does to one, without a loop over them.

A plan among a thousand ranks handles millions of boxes; here a step of it is a few operations of
numpy. Everything counts elements. Left out: names, dtypes and ranks (`burnish.parallel.pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from burnish.parallel.boxes import Box

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """Boxes of any tensors, one a row, all with as many dims as the widest.

    Dims that a tensor lacks come last, with offset 0 and size 1, which changes nothing about it.
    """

    tensor: Ints
    """`[rows]`: which tensor, as an index that means something to the caller."""
    offsets: Ints
    """`[rows, dims]`: first index per dim."""
    sizes: Ints
    """`[rows, dims]`: extent per dim."""

    @classmethod
    def of(cls, boxes: Iterable[tuple[int, Box]], dims: int) -> BoxTable:
        """A table of (tensor, box)."""
        rows = [(t, padded(box.offsets, dims, 0), padded(box.sizes, dims, 1)) for t, box in boxes]
        tensor = np.array([row[0] for row in rows], np.int64)
        offsets = np.array([row[1] for row in rows], np.int64).reshape(len(rows), dims)
        sizes = np.array([row[2] for row in rows], np.int64).reshape(len(rows), dims)
        return cls(tensor, offsets, sizes)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dims(self) -> int:
        """Columns of `offsets` and `sizes`."""
        return int(self.offsets.shape[1])

    @property
    def elements(self) -> Ints:
        """`[rows]`: how many elements each holds."""
        found: Ints = np.multiply.reduce(self.sizes, axis=1)
        return found

    def take(self, rows: NDArray[np.generic] | slice) -> BoxTable:
        """Some of the rows, by index or mask."""
        return BoxTable(self.tensor[rows], self.offsets[rows], self.sizes[rows])

    def box(self, row: int, dims: int) -> Box:
        """One box, of a tensor that has so many dims."""
        offsets, sizes = self.offsets[row, :dims].tolist(), self.sizes[row, :dims].tolist()
        return Box(tuple(offsets), tuple(sizes))


def padded(values: Sequence[int], dims: int, fill: int) -> tuple[int, ...]:
    """The values and so many of `fill` behind them that they are `dims`."""
    return (*values, *[fill] * (dims - len(values)))


def concatenated(tables: Sequence[BoxTable]) -> BoxTable:
    """The rows of several tables of the same width, one after the other."""
    return BoxTable(
        np.concatenate([table.tensor for table in tables]),
        np.concatenate([table.offsets for table in tables]),
        np.concatenate([table.sizes for table in tables]),
    )


def intersections(a: BoxTable, b: BoxTable) -> tuple[Ints, Ints, BoxTable]:
    """Every pair of boxes that have elements in common: the row of `a`, the row of `b`, the elements.

    In the order of `a`'s rows. Per tensor, boxes are looked up along the dim in which those of `b`
    begin at the most places, so that time goes with the pairs found for anything cut like a grid.
    """
    rows_a, rows_b = _candidates(a, b)
    starts = np.maximum(a.offsets[rows_a], b.offsets[rows_b])
    stops = np.minimum(a.offsets[rows_a] + a.sizes[rows_a], b.offsets[rows_b] + b.sizes[rows_b])
    meet = np.flatnonzero((stops > starts).all(axis=1))
    common = BoxTable(a.tensor[rows_a[meet]], starts[meet], (stops - starts)[meet])
    return rows_a[meet], rows_b[meet], common


def _candidates(a: BoxTable, b: BoxTable) -> tuple[Ints, Ints]:
    """Pairs of boxes that may meet: of one tensor, and overlapping along the dim of look-up."""
    dim = _lookup_dims(a, b)
    begin_a, end_a = _spans(a, dim)
    begin_b, end_b = _spans(b, dim)
    scale = max(end_a.max(initial=0), end_b.max(initial=0)) + 1  # one number for tensor and place
    order = np.lexsort((begin_b, b.tensor))
    begins = (b.tensor * scale + begin_b)[order]
    ends = np.maximum.accumulate((b.tensor * scale + end_b)[order])
    first = np.searchsorted(ends, a.tensor * scale + begin_a, side="right")
    last = np.searchsorted(begins, a.tensor * scale + end_a, side="left")
    counts = np.maximum(last - first, 0)
    rows_a = np.repeat(np.arange(len(a)), counts)
    return rows_a, order[ranges(first, counts)]


def _lookup_dims(a: BoxTable, b: BoxTable) -> Ints:
    """Per tensor, the dim in which the boxes of `b` have the most different offsets."""
    tensors = 1 + max(a.tensor.max(initial=0), b.tensor.max(initial=0))
    most, dims = np.zeros(tensors, np.int64), np.zeros(tensors, np.int64)
    for dim in range(b.dims):
        order = np.lexsort((b.offsets[:, dim], b.tensor))
        tensor, offset = b.tensor[order], b.offsets[order, dim]
        fresh = np.ones(len(order), bool)
        fresh[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
        different = np.bincount(tensor[fresh], minlength=tensors)
        better = different > most
        most[better], dims[better] = different[better], dim
    return dims


def _spans(table: BoxTable, dim: Ints) -> tuple[Ints, Ints]:
    """First and end index of each box along its tensor's dim."""
    rows, column = np.arange(len(table)), dim[table.tensor]
    begin = table.offsets[rows, column]
    return begin, begin + table.sizes[rows, column]


def ranges(starts: Ints, counts: Ints) -> Ints:
    """The integers from each start on, so many as its count, all in one row."""
    before = np.cumsum(counts) - counts
    found: Ints = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return found


def flat_ranges(shapes: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Ranges of elements in C order as boxes: the row of the range, offsets, sizes.

    `shapes` is `[rows, dims]`, padded with 1; each range lies inside its shape. Every box is one
    contiguous run; a range has at most 2 per dim. In no particular order.
    """
    rows = np.flatnonzero(starts < stops)
    starts, stops = starts[rows], stops[rows]
    offsets = np.zeros((len(rows), shapes.shape[1]), np.int64)
    found: list[tuple[Ints, Ints, Ints]] = []
    for dim in range(shapes.shape[1]):
        inner = np.prod(shapes[rows, dim + 1 :], axis=1, dtype=np.int64)
        first, head = np.divmod(starts, inner)
        last, tail = np.divmod(stops, inner)
        within = (first == last) & (starts < stops)  # one index of this dim has all of it
        body = first + (head > 0)
        full = np.flatnonzero(~within & (body < last))
        found.append(_full_boxes(shapes, rows[full], offsets[full], dim, body[full], last[full]))
        begins, ends = ~within & (head > 0), ~within & (tail > 0)
        kept = [np.flatnonzero(mask) for mask in (within, begins, ends)]
        index = np.concatenate([first[kept[0]], first[kept[1]], last[kept[2]]])
        starts = np.concatenate([head[kept[0]], head[kept[1]], np.zeros_like(kept[2])])
        stops = np.concatenate([tail[kept[0]], inner[kept[1]], tail[kept[2]]])
        rest = np.concatenate(kept)
        rows, offsets = rows[rest], offsets[rest]
        offsets[:, dim] = index
    row, box_offsets, box_sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return row, box_offsets, box_sizes


def _full_boxes(
    shapes: Ints, rows: Ints, prefix: Ints, dim: int, first: Ints, last: Ints
) -> tuple[Ints, Ints, Ints]:
    """The boxes with one index in each dim before `dim`, `first` to `last` in it, and all of those behind it."""
    offsets = prefix.copy()
    offsets[:, dim] = first
    sizes = np.ones_like(offsets)
    sizes[:, dim] = last - first
    sizes[:, dim + 1 :] = shapes[rows, dim + 1 :]
    return rows, offsets, sizes


def strides(shapes: Ints) -> Ints:
    """Per row of `[rows, dims]`, how many elements of C order lie between neighbours along each dim."""
    behind = np.ones_like(shapes)
    behind[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return behind
