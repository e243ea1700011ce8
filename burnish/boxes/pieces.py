"""Tables of ranks' pieces, small enough to exchange among a thousand ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import xxhash

from burnish.boxes.box import Box
from burnish.boxes.shards import TensorSpec
from burnish.boxes.table import BoxTable, Columns, Ints, padded
from burnish.distributed.collectives import gather_objects, gather_within, total
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError

Piece = tuple[TensorSpec, Box]
"""A shard without its memory: the tensor's spec, with the memory's dtype, and the box."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The pieces of one rank."""

    tensors: tuple[TensorSpec, ...]
    """The tensors that the pieces belong to, each once, in order of first use."""
    boxes: BoxTable
    """One row per piece; `tensor` is an index into `tensors`."""
    index: Ints
    """By row, the piece's index in the rank's list of pieces."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> PieceTable:
        """Return a table with a row per piece."""
        numbers: dict[TensorSpec, int] = {}
        rows = [(numbers.setdefault(tensor, len(numbers)), box) for tensor, box in pieces]
        dims = max([1, *(len(tensor.shape) for tensor in numbers)])
        return cls(tuple(numbers), BoxTable.of(rows, dims), np.arange(len(rows)))

    def digest(self) -> str:
        """Return a digest of the pieces in order."""
        return f"{_digest(self.tensors)} {self.boxes.digest()}"


def _digest(tensors: Sequence[TensorSpec]) -> str:
    return xxhash.xxh3_128(repr(tensors).encode()).hexdigest()


Tensors = tuple[TensorSpec, ...]


def gather_tensors(own_table: PieceTable, layout: Layout) -> list[Tensors]:
    """Return every rank's tensors. Collective. Sends names only if ranks differ."""
    digests = gather_objects(_digest(own_table.tensors), layout)
    by_digest = {digests[layout.rank]: own_table.tensors}
    if len(set(digests)) > 1:
        is_first = digests.index(digests[layout.rank]) == layout.rank
        names = gather_objects(own_table.tensors if is_first else None, layout)
        by_digest = {
            digests[rank]: tensors for rank, tensors in enumerate(names) if tensors is not None
        }
    return [by_digest[digest] for digest in digests]


def alike_tensors(
    own_pieces: Sequence[Sequence[Piece]], want: Sequence[TensorSpec], layout: Layout
) -> list[int]:
    """Return for each wanted tensor the first one that all ranks cut alike. Collective."""
    texts = [
        repr((layout.rank, [(tensor.shape, tensor.dtype, box) for tensor, box in pieces]))
        for pieces in own_pieces
    ]
    digests = np.array([xxhash.xxh3_64_intdigest(each.encode()) for each in texts], np.uint64)
    sums = total(torch.from_numpy(digests.view(np.int64)), layout).tolist()
    first: dict[tuple[object, ...], int] = {}
    cuts = [(spec.shape, spec.dtype, each) for spec, each in zip(want, sums, strict=True)]
    return [first.setdefault(each, number) for number, each in enumerate(cuts)]


def gather_pieces(own_table: PieceTable, layout: Layout) -> list[PieceTable]:
    """Return every rank's table. Collective."""
    tensors = gather_tensors(own_table, layout)
    filled = np.flatnonzero(own_table.boxes.elements)
    rows = gather_objects((own_table.boxes.take(filled), own_table.index[filled]), layout)
    return [PieceTable(named, *each) for named, each in zip(tensors, rows, strict=True)]


def gather_some(
    own_table: PieceTable,
    tensors: Sequence[Tensors],
    wanted: Collection[str],
    layout: Layout,
    dims: int,
) -> list[PieceTable]:
    """Return every rank's pieces of the tensors `wanted` on this rank. Collective.

    Ranks along the first `dims` of the grid exchange all pieces, along others only wanted ones.
    """
    inner = layout.groups[:dims]
    outer = layout.groups[dims:]
    near = gather_within((own_table.boxes, own_table.index), inner)
    first = layout.rank // len(near) * len(near)
    values = list[tuple[BoxTable, Ints]]()
    for named, (boxes, index) in zip(tensors[first : first + len(near)], near, strict=True):
        rows = np.array([tensor.name in wanted for tensor in named], bool)[boxes.tensor]
        rows &= boxes.sizes.all(axis=1)  # leave out empty boxes
        values.append((boxes.take(rows), index[rows]))
    values = [each for part in gather_within(values, outer) for each in part]
    return [PieceTable(named, *each) for named, each in zip(tensors, values, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(Columns):
    """All ranks' pieces that are not empty."""

    boxes: BoxTable
    """One row per piece; `tensor` is an index into the names of a `TensorIndex`."""
    rank: Ints
    """The rank that holds the piece."""
    index: Ints
    """The piece's index in that rank's list of pieces."""
    dtype: Ints
    """Index into the dtypes of the `TensorIndex`."""

    def __len__(self) -> int:
        return len(self.rank)


class TensorIndex:
    """Number tensor names and dtypes by first use; `shapes` are global."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[torch.dtype] = []
        self._numbers: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    @property
    def dims(self) -> int:
        """Most dims of a tensor; 1 at least."""
        return max([1, *map(len, self.shapes)])

    def merge(self, *sides: Sequence[PieceTable]) -> list[Pieces]:
        """Merge each list of tables by rank into one. Raises `IncompatibleError` where ranks disagree on a shape."""
        numbers: dict[Tensors, tuple[Ints, Ints]] = {}
        for tables in sides:
            rank = 0
            for tensors, alike in groupby(table.tensors for table in tables):
                if tensors not in numbers:
                    numbers[tensors] = self.add(tensors, f"on rank {rank}")
                rank += sum(1 for _ in alike)
        return [_merged(tables, numbers, self.dims) for tables in sides]

    def add(self, tensors: Sequence[TensorSpec], where: str) -> tuple[Ints, Ints]:
        """Return the numbers of tensors and of their dtypes. Raises `IncompatibleError`, naming `where`, for another shape."""
        numbers = []
        kinds = []
        for name, shape, dtype in tensors:
            number = self._numbers.setdefault(name, len(self.names))
            if number == len(self.names):
                self.names.append(name)
                self.shapes.append(shape)
            if self.shapes[number] != shape:
                raise IncompatibleError(
                    f"tensor {name} has different shapes",
                    have=list(self.shapes[number]),
                    want=f"{list(shape)} {where}",
                )
            if dtype not in self.dtypes:
                self.dtypes.append(dtype)
            numbers.append(number)
            kinds.append(self.dtypes.index(dtype))
        return np.array(numbers, np.int64), np.array(kinds, np.int64)

    def shape_table(self) -> Ints:
        """`[tensors, dims]`: all shapes, padded with 1."""
        rows = [padded(shape, self.dims, 1) for shape in self.shapes]
        return np.array(rows, np.int64).reshape(len(rows), self.dims)

    def itemsizes(self) -> Ints:
        """`[dtypes]`: bytes per element."""
        return np.array([dtype.itemsize for dtype in self.dtypes], np.int64)


def _merged(
    tables: Sequence[PieceTable],
    numbers: dict[Tensors, tuple[Ints, Ints]],
    dims: int,
) -> Pieces:
    """Merge tables by rank; handle consecutive ranks with the same tensors at once."""
    by_run = list[Pieces]()
    rank = 0
    for named, alike in groupby(tables, lambda table: (table.tensors, table.boxes.dims)):
        run = list(alike)
        rows = np.array([len(table.boxes) for table in run])
        boxes = BoxTable.concatenate([table.boxes for table in run])
        filled = np.flatnonzero(boxes.elements)
        boxes = boxes.take(filled)
        tensor, kind = numbers[named[0]]
        padding = ((0, 0), (0, dims - boxes.dims))
        offsets = np.pad(boxes.offsets, padding)
        sizes = np.pad(boxes.sizes, padding, constant_values=1)
        widened = BoxTable(tensor[boxes.tensor], offsets, sizes)
        ranks = np.repeat(np.arange(rank, rank + len(run)), rows)[filled]
        index = np.concatenate([table.index for table in run])[filled]
        by_run.append(Pieces(widened, ranks, index, kind[boxes.tensor]))
        rank += len(run)
    return Pieces.concatenate(by_run)
