"""Boxes as numpy arrays: a plan for a thousand ranks has millions of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from burnish.boxes.box import Box

Ints = NDArray[np.int64]

# Rows per lookup. A lookup's candidate pairs take much more memory than its results.
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A table: the subclass's arrays and tables have one entry per row."""

    def take(self, rows: NDArray[np.generic] | slice) -> Self:
        """Return rows by index or mask."""
        return replace(
            self,
            **{
                name: column.take(rows) if isinstance(column, Columns) else column[rows]
                for name, column in self._columns()
            },
        )

    @classmethod
    def concatenate(cls, tables: Sequence[Self]) -> Self:
        """Join rows of tables that agree in other fields."""
        joined: dict[str, Any] = {}
        for name, column in tables[0]._columns():
            columns = [getattr(table, name) for table in tables]
            is_table = isinstance(column, Columns)
            concatenate = type(column).concatenate if is_table else np.concatenate
            joined[name] = concatenate(columns)
        return replace(tables[0], **joined)

    def digest(self) -> str:
        """Return a digest of all rows in order."""
        digest = xxhash.xxh3_128()
        for _, column in self._columns():
            if isinstance(column, Columns):
                digest.update(column.digest().encode())
            else:
                digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:  # fast, because a thousand ranks exchange tables
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def _columns(self) -> list[tuple[str, Any]]:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [each for each in values if isinstance(each[1], np.ndarray | Columns)]


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable(Columns):
    """Boxes of any tensors, one a row. Missing dims come last, with offset 0 and size 1."""

    tensor: Ints
    """`[rows]`: index of the tensor in the caller's list."""
    offsets: Ints
    """`[rows, dims]`, as are `sizes`."""
    sizes: Ints

    @classmethod
    def of(cls, boxes: Iterable[tuple[int, Box]], dims: int) -> BoxTable:
        """Return a table of (tensor, box)."""
        rows = [(t, padded(box.offsets, dims, 0), padded(box.sizes, dims, 1)) for t, box in boxes]
        tensor, offsets, sizes = (
            np.array([row[column] for row in rows], np.int64) for column in range(3)
        )
        return cls(tensor, offsets.reshape(-1, dims), sizes.reshape(-1, dims))

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dims(self) -> int:
        """Columns of `offsets` and `sizes`."""
        return int(self.offsets.shape[1])

    @property
    def elements(self) -> Ints:
        """`[rows]`: elements of each box."""
        return np.multiply.reduce(self.sizes, axis=1)

    def box(self, row: int, dims: int) -> Box:
        """Return a row's box, in a tensor with `dims` dims."""
        offsets = self.offsets[row, :dims].tolist()
        sizes = self.sizes[row, :dims].tolist()
        return Box(tuple(offsets), tuple(sizes))


def padded(values: Sequence[int], dims: int, fill: int) -> tuple[int, ...]:
    """Pad values with `fill` to `dims` entries."""
    return (*values, *[fill] * (dims - len(values)))


class BoxIndex:
    """Find overlapping boxes. Boxes that form a grid take time proportional to the results."""

    def __init__(self, boxes: BoxTable) -> None:
        self._boxes = boxes
        self._dims = _most_cut_dims(boxes)
        begin, end = self._spans(boxes)
        self._scale = int(end.max(initial=0)) + 1  # tensor * scale + place sorts by both
        self._order = np.lexsort((begin, boxes.tensor))
        places = boxes.tensor * self._scale
        self._begins = (places + begin)[self._order]
        self._ends = np.maximum.accumulate((places + end)[self._order])

    def meeting(self, others: BoxTable) -> tuple[Ints, Ints, BoxTable]:
        """Return overlapping pairs: row of `others` (ascending), row here, common box."""
        starts = range(0, max(len(others), 1), _ROWS_AT_ONCE)
        meetings = [self._meeting(others.take(slice(at, at + _ROWS_AT_ONCE))) for at in starts]
        other_rows = [rows + at for at, (rows, _, _) in zip(starts, meetings, strict=True)]
        own_rows = [rows for _, rows, _ in meetings]
        common = [boxes for _, _, boxes in meetings]
        return np.concatenate(other_rows), np.concatenate(own_rows), BoxTable.concatenate(common)

    def _meeting(self, others: BoxTable) -> tuple[Ints, Ints, BoxTable]:
        other_rows, own_rows = self._candidates(others)
        a = others.take(other_rows)
        b = self._boxes.take(own_rows)
        starts = np.maximum(a.offsets, b.offsets)
        sizes = np.minimum(a.offsets + a.sizes, b.offsets + b.sizes) - starts
        meet = np.flatnonzero((sizes > 0).all(axis=1))
        return other_rows[meet], own_rows[meet], BoxTable(a.tensor[meet], starts[meet], sizes[meet])

    def _candidates(self, others: BoxTable) -> tuple[Ints, Ints]:
        begin, end = self._spans(others)
        places = others.tensor * self._scale
        last_place = self._scale - 1  # no box of this index reaches further
        first = np.searchsorted(self._ends, places + np.minimum(begin, last_place), side="right")
        last = np.searchsorted(self._begins, places + np.minimum(end, last_place), side="left")
        counts = np.maximum(last - first, 0)
        rows = np.repeat(np.arange(len(others)), counts)
        return rows, self._order[ranges(first, counts)]

    def _spans(self, boxes: BoxTable) -> tuple[Ints, Ints]:
        known = np.minimum(boxes.tensor, max(len(self._dims) - 1, 0))
        dim = self._dims[known] if len(self._dims) else np.zeros_like(known)
        rows = np.arange(len(boxes))
        begin = boxes.offsets[rows, dim]
        return begin, begin + boxes.sizes[rows, dim]


def _most_cut_dims(boxes: BoxTable) -> Ints:
    tensors = int(boxes.tensor.max(initial=-1)) + 1
    most = np.zeros(tensors, np.int64)
    dims = np.zeros(tensors, np.int64)
    for dim in range(boxes.dims):
        if not boxes.offsets[:, dim].any():
            continue
        order = np.lexsort((boxes.offsets[:, dim], boxes.tensor))
        tensor = boxes.tensor[order]
        offset = boxes.offsets[order, dim]
        fresh = np.ones(len(order), bool)
        fresh[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
        different = np.bincount(tensor[fresh], minlength=tensors)
        better = different > most
        most[better], dims[better] = different[better], dim
    return dims


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Join the ranges of `counts` integers from each start on."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def flat_ranges(shapes: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """Turn flat ranges of `shapes` `[rows, dims]` into contiguous boxes, at most 2 per dim: rows, offsets, sizes."""
    rows = np.flatnonzero(starts < stops)
    starts = starts[rows]
    stops = stops[rows]
    offsets = np.zeros((len(rows), shapes.shape[1]), np.int64)
    boxes: list[tuple[Ints, Ints, Ints]] = []
    for dim in range(shapes.shape[1]):
        inner = np.prod(shapes[rows, dim + 1 :], axis=1, dtype=np.int64)
        first, head = np.divmod(starts, inner)
        last, tail = np.divmod(stops, inner)
        within = (first == last) & (starts < stops)  # one index of this dim has the whole range
        body = first + (head > 0)
        full = np.flatnonzero(~within & (body < last))
        # Each box has one index of the dims before `dim`, `body` to `last` of `dim`, and all of later dims.
        box_offsets = offsets[full]
        box_offsets[:, dim] = body[full]
        box_sizes = np.ones_like(box_offsets)
        box_sizes[:, dim] = (last - body)[full]
        box_sizes[:, dim + 1 :] = shapes[rows[full], dim + 1 :]
        boxes.append((rows[full], box_offsets, box_sizes))
        # The next dim divides what lies within one index, before the whole indices (heads) and after them (tails).
        inside = np.flatnonzero(within)
        heads = np.flatnonzero(~within & (head > 0))
        tails = np.flatnonzero(~within & (tail > 0))
        index = np.concatenate([first[inside], first[heads], last[tails]])
        starts = np.concatenate([head[inside], head[heads], np.zeros_like(tails)])
        stops = np.concatenate([tail[inside], inner[heads], tail[tails]])
        rest = np.concatenate([inside, heads, tails])
        rows = rows[rest]
        offsets = offsets[rest]
        offsets[:, dim] = index
    row, box_offsets, box_sizes = (np.concatenate(parts) for parts in zip(*boxes, strict=True))
    return row, box_offsets, box_sizes


def strides(shapes: Ints) -> Ints:
    """Return the C-order strides, in elements, of shapes `[rows, dims]`."""
    behind = np.ones_like(shapes)
    behind[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return behind
