"""Plan who sends which box to whom, in rounds of bounded bytes, to publish, save, load and reshard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
import xxhash

from burnish.boxes.box import Box, intersect, subtract
from burnish.boxes.pieces import Pieces, PieceTable, TensorIndex
from burnish.boxes.table import BoxIndex, BoxTable, Columns, Ints, ranges
from burnish.errors import MissingError

WAVE_BYTES = 64 << 20
"""Most bytes that a rank sends, and most that it receives, in one wave, unless asked otherwise."""
ALIGN = 16
"""Every part of a message starts at a multiple of this, so that it can be viewed as any dtype."""

_PARTS_PER_WAVE = 4  # at least, because longer moves are cut


@dataclass(frozen=True, slots=True)
class Move:
    """One box that goes from one rank's piece to another's."""

    source: int
    """The rank that sends the box, from its piece number `have`."""
    have: int
    target: int
    """The rank that receives the box, into its piece number `want`."""
    want: int
    box: Box
    """In global coordinates."""
    dtype: torch.dtype
    """The wanted dtype, in which the box travels."""

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
        columns = (self.source, self.have, self.target, self.want, self.dtype)
        for row, (source, have, target, want, dtype) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            box = self.boxes.box(row, len(self.tensors.shapes[self.boxes.tensor[row]]))
            yield Move(source, have, target, want, box, self.tensors.dtypes[dtype])

    @property
    def bytes(self) -> Ints:
        """`[rows]`: bytes of each move."""
        return self.boxes.elements * self.tensors.itemsizes()[self.dtype]

    def digest(self) -> str:
        """Return a digest, equal on ranks with the same plan."""
        names = repr((self.tensors.names, self.tensors.dtypes))
        return xxhash.xxh3_128((names + Columns.digest(self)).encode()).hexdigest()


def plan(have: Sequence[PieceTable], want: Sequence[PieceTable]) -> Moves:
    """Cover every wanted element once, in the order of the wanted pieces; the tables are by rank.

    A rank uses elements that it holds; otherwise holders take turns. Raises `MissingError` for an element without a holder, and
    `IncompatibleError` where shapes disagree.
    """
    tensors = TensorIndex()
    held_pieces, wanted_pieces = tensors.merge(have, want)
    return Coverage.of(held_pieces, wanted_pieces, tensors).moves(wanted_pieces.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """Wanted pieces, cut into parts. Each part lies in one cell: a box that its holders hold whole."""

    tensors: TensorIndex
    wanted: Pieces
    want: Ints
    """Per part, the row of `wanted`; ascending."""
    cell: Ints
    """Per part, the cell that it lies in."""
    boxes: BoxTable
    """Per part, its elements."""
    holder_pieces: Pieces
    """The holders: one row per cell and holder, sorted by cell and rank."""
    holder_cells: Ints
    """Per row of `holder_pieces`, the cell."""
    cells: BoxIndex

    @classmethod
    def of(cls, held_pieces: Pieces, wanted: Pieces, tensors: TensorIndex) -> Coverage:
        """Find the holders of all wanted elements. Raises `MissingError` naming tensor and box."""
        return cls._of_cells(*_cells(held_pieces, tensors), wanted, tensors)

    def of_others(self, wanted: Pieces) -> Coverage:
        """Cover other wanted pieces of the same tensors."""
        return self._of_cells(
            self.cells, self.holder_pieces, self.holder_cells, wanted, self.tensors
        )

    @classmethod
    def _of_cells(
        cls,
        cells: BoxIndex,
        holder_pieces: Pieces,
        holder_cells: Ints,
        wanted: Pieces,
        tensors: TensorIndex,
    ) -> Coverage:
        want, cell, boxes = cells.meeting(wanted.boxes)
        covered = np.bincount(want, boxes.elements, minlength=len(wanted)).astype(np.int64)
        lacking = np.flatnonzero(covered != wanted.boxes.elements)
        if len(lacking):
            row = int(lacking[0])
            raise _no_holder(wanted.boxes, row, boxes.take(want == row), tensors)
        return cls(tensors, wanted, want, cell, boxes, holder_pieces, holder_cells, cells)

    def holders(self) -> tuple[Ints, Ints]:
        """Return every pair of part and row of `holder_pieces`."""
        first, count = self._of_cell()
        return np.repeat(np.arange(len(self.cell)), count), ranges(first, count)

    def moves(self, targets: Ints) -> Moves:
        """Move each part from a holder to its target; `targets` has a rank per row of `wanted`."""
        target = targets[self.want]
        first, count = self._of_cell()
        in_turn = first + np.arange(len(first)) % np.maximum(count, 1)
        scale = max(self.holder_pieces.rank.max(initial=0), targets.max(initial=0)) + 1
        keys = self.holder_cells * scale + self.holder_pieces.rank
        own = np.searchsorted(keys, self.cell * scale + target)
        own = np.minimum(own, len(keys) - 1)
        is_own = keys[own] == self.cell * scale + target if len(keys) else np.zeros(0, bool)
        return self._moves(np.where(is_own, own, in_turn), target)

    @property
    def turns(self) -> int:
        """Return the number of turns after which holders repeat."""
        return int(np.lcm.reduce(np.unique(self._of_cell()[1]), initial=1))

    def in_turn(self, rank: int, world: int, turn: int) -> tuple[Moves, Ints]:
        """Take each part once, for all ranks, from the holder whose `turn` it is. Also return which parts all ranks hold.

        `rank` takes those from itself.
        """
        first, count = self._of_cell()
        fresh = np.diff(self.holder_pieces.rank, prepend=-1) != 0
        fresh |= np.diff(self.holder_cells, prepend=-1) != 0  # a rank may hold a cell twice
        ranks = np.append(0, np.cumsum(fresh))
        everywhere = (count == world) & (ranks[first + count] - ranks[first] == world)
        chosen = first + np.where(everywhere, rank, turn % np.maximum(count, 1))
        return self._moves(chosen, np.full(len(chosen), rank)), everywhere.astype(np.int64)

    def _moves(self, chosen: Ints, target: Ints) -> Moves:
        return Moves(
            self.tensors,
            self.holder_pieces.rank[chosen],
            self.holder_pieces.index[chosen],
            target,
            self.wanted.index[self.want],
            self.boxes,
            self.wanted.dtype[self.want],
        )

    def _of_cell(self) -> tuple[Ints, Ints]:
        first = np.searchsorted(self.holder_cells, self.cell, side="left")
        return first, np.searchsorted(self.holder_cells, self.cell, side="right") - first


def _cells(holders: Pieces, tensors: TensorIndex) -> tuple[BoxIndex, Pieces, Ints]:
    """Cut held boxes into disjoint cells; return cells, holders and each holder's cell."""
    cells, holders, cell = _distinct(holders)
    index = BoxIndex(cells)
    a, b, _ = index.meeting(cells)
    overlapping = np.unique(cells.tensor[a[a != b]])
    if len(overlapping):
        cells, holders, cell = _distinct(_disjoint(holders, overlapping, tensors))
        index = BoxIndex(cells)
    return index, holders, cell


def _distinct(holders: Pieces) -> tuple[BoxTable, Pieces, Ints]:
    """Return distinct boxes, holders sorted by box and rank, and each holder's box."""
    boxes = holders.boxes
    columns = [boxes.tensor, *boxes.offsets.T, *boxes.sizes.T]
    varying = [column for column in columns if len(column) and (column != column[0]).any()]
    order = np.lexsort((holders.rank, *varying[::-1]))
    holders = holders.take(order)
    fresh = np.zeros(len(holders), bool)
    fresh[:1] = True
    for column in varying:
        fresh[1:] |= column[order[1:]] != column[order[:-1]]
    return holders.boxes.take(fresh), holders, np.cumsum(fresh) - 1


def _disjoint(holders: Pieces, overlapping: Ints, tensors: TensorIndex) -> Pieces:
    """Cut `overlapping` tensors' pieces until any two are equal or disjoint."""
    mixed = np.isin(holders.boxes.tensor, overlapping)
    rows = []
    boxes = []
    for tensor in overlapping.tolist():
        dims = len(tensors.shapes[tensor])
        parts: list[tuple[Box, list[int]]] = []
        for row in np.flatnonzero(holders.boxes.tensor == tensor).tolist():
            parts = _split(parts, holders.boxes.box(row, dims), row)
        for box, part_holders in parts:
            rows += part_holders
            boxes += [(tensor, box)] * len(part_holders)
    cut = holders.take(np.array(rows, np.int64))
    cut = replace(cut, boxes=BoxTable.of(boxes, holders.boxes.dims))
    return Pieces.concatenate([holders.take(~mixed), cut])


def _split(parts: list[tuple[Box, list[int]]], box: Box, row: int) -> list[tuple[Box, list[int]]]:
    disjoint: list[tuple[Box, list[int]]] = []
    uncovered = [box]
    for part, holders in parts:
        common = intersect(part, box)
        if common is None:
            disjoint.append((part, holders))
            continue
        disjoint += [(rest, holders) for rest in subtract(part, common)]
        disjoint.append((common, [*holders, row]))
        uncovered = [rest for box_left in uncovered for rest in subtract(box_left, common)]
    return disjoint + [(rest, [row]) for rest in uncovered]


def _no_holder(
    wanted: BoxTable, row: int, held_boxes: BoxTable, tensors: TensorIndex
) -> MissingError:
    tensor = int(wanted.tensor[row])
    name = tensors.names[tensor]
    shape = tensors.shapes[tensor]
    wanted_box = wanted.box(row, len(shape))
    uncovered = [wanted_box]
    for part in range(len(held_boxes)):
        box = held_boxes.box(part, len(shape))
        uncovered = [rest for box_left in uncovered for rest in subtract(box_left, box)]
    return MissingError(
        f"no rank holds all of tensor {name}",
        have=f"nobody holds offsets {list(uncovered[0].offsets)}, sizes {list(uncovered[0].sizes)}",
        want=f"offsets {list(wanted_box.offsets)}, sizes {list(wanted_box.sizes)} of {list(shape)}",
    )


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's share of moves that are carried out together."""

    own: list[Move]
    """Moves from this rank to itself."""
    waves: list[list[Move]]
    """Moves from or to other ranks, by round. Every rank has the same number of rounds."""

    def shifted(self, by: int) -> Group:
        """Return the same moves, with `by` added to each `want`."""
        shift = [[replace(m, want=m.want + by) for m in some] for some in (self.own, *self.waves)]
        return Group(shift[0], shift[1:])


def schedule(
    moves: Moves,
    ranks: Iterable[int],
    wave_bytes: int = WAVE_BYTES,
    group: Ints | None = None,
    groups: int = 1,
) -> list[list[Group]]:
    """Return each of `ranks`' moves in each of `groups` consecutive groups; `group` has the group of each move.

    Per round a rank sends and receives at most `wave_bytes`; large moves are cut. Raises `ValueError` below 64 bytes.
    """
    if wave_bytes < _PARTS_PER_WAVE * ALIGN:
        raise ValueError(f"a wave of {wave_bytes} bytes is too short for four parts of {ALIGN}")
    group = np.zeros(len(moves), np.int64) if group is None else group
    remote = np.flatnonzero(moves.source != moves.target)
    travelling, group_of = cut(moves.take(remote), group[remote], wave_bytes)
    number = rounds(travelling, group_of, wave_bytes)
    last = np.full(groups, -1)
    np.maximum.at(last, group_of, number)
    schedules = list[list[Group]]()
    for rank in ranks:
        rank_groups = [Group([], [[] for _ in range(most + 1)]) for most in last.tolist()]
        local_rows = np.flatnonzero((moves.source == rank) & (moves.target == rank))
        for move, place in zip(moves.take(local_rows), group[local_rows].tolist(), strict=True):
            rank_groups[place].own.append(move)
        remote_rows = np.flatnonzero((travelling.source == rank) | (travelling.target == rank))
        places = zip(group_of[remote_rows].tolist(), number[remote_rows].tolist(), strict=True)
        for move, (place, wave) in zip(travelling.take(remote_rows), places, strict=True):
            rank_groups[place].waves[wave].append(move)
        schedules.append(rank_groups)
    return schedules


def rounds(moves: Moves, group: Ints, wave_bytes: int) -> Ints:
    """Return each move's round in its group, about the first with room."""
    world = 1 + max(moves.source.max(initial=0), moves.target.max(initial=0))
    distance = (moves.target - moves.source) % world
    order = np.lexsort((distance, group))  # every rank sends to its neighbours first
    size = -(-moves.bytes[order] // ALIGN) * ALIGN
    sender = (group * world + moves.source)[order]
    receiver = (group * world + moves.target)[order]
    room = [_Room(key, size, wave_bytes) for key in (sender, receiver)]
    earliest = np.maximum(room[0].earliest(), room[1].earliest())
    due = np.argsort(earliest, kind="stable")
    begins = np.searchsorted(earliest[due], np.arange(earliest.max(initial=-1) + 2))
    number = np.full(len(moves), -1)
    waiting = np.zeros(0, np.int64)
    for current in count():
        if current + 1 < len(begins):
            new = due[begins[current] : begins[current + 1]]
            waiting = np.sort(np.concatenate([waiting, new]))
        elif not len(waiting):
            break
        for side in room:
            side.empty()
        goes = np.ones(1, bool)
        while goes.any():
            goes = room[0].fits(waiting) & room[1].fits(waiting)
            for side in room:
                side.fill(waiting[goes])
            number[waiting[goes]] = current
            waiting = waiting[~goes]
    rounds_by_move = np.empty_like(number)
    rounds_by_move[order] = number
    return rounds_by_move


class _Room:
    """Bytes that each rank can still send, or receive, this round."""

    def __init__(self, rank: Ints, size: Ints, limit: int) -> None:
        self._rank = np.unique(rank, return_inverse=True)[1]
        self._size = size
        self._limit = limit
        self._full = np.zeros(self._rank.max(initial=-1) + 1, np.int64)

    def earliest(self) -> Ints:
        upto = _running_totals(self._rank, self._size)
        return (upto - 1) // self._limit

    def empty(self) -> None:
        self._full[:] = 0

    def fits(self, rows: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Tell which moves have room if all earlier ones go too."""
        upto = _running_totals(self._rank[rows], self._size[rows])
        return upto + self._full[self._rank[rows]] <= self._limit

    def fill(self, rows: Ints) -> None:
        np.add.at(self._full, self._rank[rows], self._size[rows])


def _running_totals(keys: Ints, values: Ints) -> Ints:
    order = np.argsort(keys, kind="stable")
    total = np.cumsum(values[order])
    first = np.searchsorted(keys[order], keys[order])
    running = np.empty_like(total)
    running[order] = total - np.where(first > 0, total[first - 1], 0)
    return running


def cut(moves: Moves, group: Ints, wave_bytes: int) -> tuple[Moves, Ints]:
    """Cut moves into parts of at most a quarter of a wave; return parts and their `group`."""
    largest = wave_bytes // (_PARTS_PER_WAVE * ALIGN) * ALIGN
    origin = np.arange(len(moves))
    while (big := moves.bytes > largest).any():
        rows = np.flatnonzero(big)
        sizes = moves.boxes.sizes[rows]
        dim = (sizes > 1).argmax(axis=1)
        half = sizes[np.arange(len(rows)), dim] // 2
        moves = _with_halves(moves, rows, dim, half)
        origin = np.concatenate([origin, origin[rows]])
    order = np.argsort(origin, kind="stable")
    return moves.take(order), group[origin[order]]


def _with_halves(moves: Moves, rows: Ints, dim: Ints, half: Ints) -> Moves:
    first = moves.take(np.arange(len(moves)))
    rest = moves.take(rows)
    first.boxes.sizes[rows, dim] = half
    at = np.arange(len(rows)), dim
    rest.boxes.offsets[at] += half
    rest.boxes.sizes[at] -= half
    return Moves.concatenate([first, rest])
