"""Schedule a plan's moves in rounds that bound the bytes a rank sends or receives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from burnish.boxes.plan import Move, Moves
from burnish.boxes.table import Ints

WAVE_BYTES = 64 << 20
"""Most bytes that a rank sends, and most that it receives, in one wave, unless asked otherwise."""
ALIGN = 16
"""Every part of a message starts at a multiple of this, so that it can be viewed as any dtype."""

_LONGEST_PARTS = 4  # a wave has room for at least so many parts


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's share of moves that are carried out together."""

    own: list[Move]
    """From this rank to itself."""
    waves: list[list[Move]]
    """From or to another rank, by round: as many rounds on every rank."""

    def shifted(self, by: int) -> Group:
        """Return the same moves, with `want` higher by so much."""
        shift = [[replace(m, want=m.want + by) for m in some] for some in (self.own, *self.waves)]
        return Group(shift[0], shift[1:])


def schedule(
    moves: Moves,
    ranks: Iterable[int],
    wave_bytes: int = WAVE_BYTES,
    group: Ints | None = None,
    groups: int = 1,
) -> list[list[Group]]:
    """Return the moves of each of `ranks` in each of `groups`, which follow each other; `group` gives each move's.

    Per round a rank sends and receives at most `wave_bytes`; large moves are cut. Raises `ValueError` below 64 bytes.
    """
    if wave_bytes < _LONGEST_PARTS * ALIGN:
        raise ValueError(f"a wave of {wave_bytes} bytes holds no four parts of {ALIGN} bytes")
    group = np.zeros(len(moves), np.int64) if group is None else group
    remote = np.flatnonzero(moves.source != moves.target)
    travelling, group_of = cut(moves.take(remote), group[remote], wave_bytes)
    number = rounds(travelling, group_of, wave_bytes)
    last = np.full(groups, -1)
    np.maximum.at(last, group_of, number)
    told = list[list[Group]]()
    for rank in ranks:
        found = [Group([], [[] for _ in range(most + 1)]) for most in last.tolist()]
        own = np.flatnonzero((moves.source == rank) & (moves.target == rank))
        for move, place in zip(moves.take(own), group[own].tolist(), strict=True):
            found[place].own.append(move)
        mine = np.flatnonzero((travelling.source == rank) | (travelling.target == rank))
        places = zip(group_of[mine].tolist(), number[mine].tolist(), strict=True)
        for move, (place, wave) in zip(travelling.take(mine), places, strict=True):
            found[place].waves[wave].append(move)
        told.append(found)
    return told


def rounds(moves: Moves, group: Ints, wave_bytes: int) -> Ints:
    """Return each move's round in its group: about the first with room."""
    world = 1 + max(moves.source.max(initial=0), moves.target.max(initial=0))
    distance = (moves.target - moves.source) % world
    order = np.lexsort((distance, group))  # all ranks begin with their neighbours
    size = -(-moves.bytes[order] // ALIGN) * ALIGN
    sender = (group * world + moves.source)[order]
    getter = (group * world + moves.target)[order]
    room = [_Room(key, size, wave_bytes) for key in (sender, getter)]
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
        for each in room:
            each.empty()
        goes = np.ones(1, bool)
        while goes.any():
            goes = room[0].fits(waiting) & room[1].fits(waiting)
            for each in room:
                each.fill(waiting[goes])
            number[waiting[goes]] = current
            waiting = waiting[~goes]
    found = np.empty_like(number)
    found[order] = number
    return found


class _Room:
    """Bytes that each rank can still send, or receive."""

    def __init__(self, rank: Ints, size: Ints, limit: int) -> None:
        self._rank = np.unique(rank, return_inverse=True)[1]
        self._size = size
        self._limit = limit
        self._full = np.zeros(self._rank.max(initial=-1) + 1, np.int64)

    def earliest(self) -> Ints:
        upto = _running(self._rank, self._size)
        return (upto - 1) // self._limit

    def empty(self) -> None:
        self._full[:] = 0

    def fits(self, rows: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Tell which moves have room if all earlier ones go too."""
        upto = _running(self._rank[rows], self._size[rows])
        return upto + self._full[self._rank[rows]] <= self._limit

    def fill(self, rows: Ints) -> None:
        np.add.at(self._full, self._rank[rows], self._size[rows])


def _running(keys: Ints, values: Ints) -> Ints:
    order = np.argsort(keys, kind="stable")
    total = np.cumsum(values[order])
    first = np.searchsorted(keys[order], keys[order])
    found = np.empty_like(total)
    found[order] = total - np.where(first > 0, total[first - 1], 0)
    return found


def cut(moves: Moves, group: Ints, wave_bytes: int) -> tuple[Moves, Ints]:
    """Cut moves into parts of at most a quarter of a wave; return parts and their `group`."""
    largest = wave_bytes // (_LONGEST_PARTS * ALIGN) * ALIGN
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
