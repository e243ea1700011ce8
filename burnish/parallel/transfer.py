"""From who has what to who wants what: one plan for publishing, saving, loading and resharding.

`plan` is pure arithmetic over all ranks' pieces; `waves` cuts it into rounds of bounded bytes;
`exchange` runs one round. `Transfer` puts the three together for shards in memory and keeps the
plan between runs. Elements are converted on the rank that sends them, so what travels has the
wanted dtype. Left out: files (`burnish.checkpoint` reads and writes blocks as pieces of this plan).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.errors import IncompatibleError, MissingError
from burnish.parallel.boxes import Box, flat_range, intersect, subtract
from burnish.parallel.collectives import gather_objects
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Piece, Shard

WAVE_BYTES = 64 << 20
"""Most bytes that a rank sends, and most that it receives, in one wave, unless asked otherwise."""

_ALIGN = (
    16  # every message part starts at a multiple of this, so that it can be viewed as any dtype
)


@dataclass(frozen=True, slots=True)
class Move:
    """One box that goes from one rank's piece to another's."""

    source: int
    """Rank that has it."""
    have: int
    """Index among the source's pieces."""
    target: int
    """Rank that wants it."""
    want: int
    """Index among the target's pieces."""
    box: Box
    """What goes, in global coordinates."""
    dtype: torch.dtype
    """The dtype wanted, in which it travels."""

    @property
    def bytes(self) -> int:
        """How many bytes travel."""
        return self.box.elements * self.dtype.itemsize


def plan(have: Sequence[Sequence[Piece]], want: Sequence[Sequence[Piece]]) -> list[Move]:
    """Cover every wanted element once, from one holder; `have` and `want` are lists by rank.

    An element that several ranks hold comes from the wanting rank itself where that is one of them,
    and from the others in turn where not. Moves come in the order of the wanted pieces. Raises
    `MissingError` naming tensor and box when nobody holds something, `IncompatibleError` when two
    pieces disagree on a tensor's shape.
    """
    held = _index(have)
    moves: list[Move] = []
    for target, pieces in enumerate(want):
        for number, piece in enumerate(pieces):
            if piece.box.elements == 0:
                continue
            if piece.name not in held:
                raise _nobody_has(piece, piece.box)
            held[piece.name].check_shape(piece, target)
            for box, source, index in held[piece.name].cover(piece, target, len(moves)):
                moves.append(Move(source, index, target, number, box, piece.dtype))
    return moves


class _Held:
    """All pieces of one tensor, over all ranks, to be found by box."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.holders: dict[Box, dict[int, int]] = {}  # box -> rank -> index among its pieces
        self._boxes: list[Box] = []
        self._starts: list[int] = []
        self._ends: list[int] = []

    def seal(self) -> None:
        """Sort the boxes along the first dim, for `_near`."""
        self._boxes = sorted(self.holders)
        spans = [_rows(box) for box in self._boxes]
        self._starts = [start for start, _ in spans]
        self._ends = list(accumulate((end for _, end in spans), max))

    def check_shape(self, piece: Piece, rank: int) -> None:
        """Refuse a piece of a tensor of another shape."""
        if piece.shape != self.shape:
            raise IncompatibleError(
                f"tensor {piece.name} has different shapes",
                have=list(self.shape),
                want=f"{list(piece.shape)} on rank {rank}",
            )

    def cover(self, piece: Piece, target: int, turn: int) -> list[tuple[Box, int, int]]:
        """The wanted box as (box, rank, index among the rank's pieces), own pieces first."""
        found: list[tuple[Box, int, int]] = []
        left = [piece.box]
        for box in sorted(self._near(piece.box), key=lambda box: target not in self.holders[box]):
            rest: list[Box] = []
            for part in left:
                common = intersect(part, box)
                if common is None:
                    rest.append(part)
                    continue
                found.append((common, *self._holder(box, target, turn + len(found))))
                rest += subtract(part, common)
            left = rest
            if not left:
                return found
        raise _nobody_has(piece, left[0])

    def _near(self, box: Box) -> list[Box]:
        """The boxes that may overlap this one, by the first dim."""
        start, end = _rows(box)
        return self._boxes[bisect_right(self._ends, start) : bisect_left(self._starts, end)]

    def _holder(self, box: Box, target: int, turn: int) -> tuple[int, int]:
        """Rank and index of the one that gives this box: the target itself, or another in turn."""
        ranks = self.holders[box]
        rank = target if target in ranks else list(ranks)[turn % len(ranks)]
        return rank, ranks[rank]


def _index(have: Sequence[Sequence[Piece]]) -> dict[str, _Held]:
    held: dict[str, _Held] = {}
    for rank, pieces in enumerate(have):
        for number, piece in enumerate(pieces):
            if piece.box.elements == 0:
                continue
            tensor = held.setdefault(piece.name, _Held(piece.shape))
            tensor.check_shape(piece, rank)
            tensor.holders.setdefault(piece.box, {}).setdefault(rank, number)
    for tensor in held.values():
        tensor.seal()
    return held


def _rows(box: Box) -> tuple[int, int]:
    """First and end index along the first dim; a scalar counts as one row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def _nobody_has(piece: Piece, box: Box) -> MissingError:
    return MissingError(
        f"no rank holds all of tensor {piece.name}",
        have=f"nobody holds offsets {list(box.offsets)}, sizes {list(box.sizes)}",
        want=f"offsets {list(piece.box.offsets)}, sizes {list(piece.box.sizes)} of {list(piece.shape)}",
    )


def waves(moves: Iterable[Move], wave_bytes: int = WAVE_BYTES) -> list[list[Move]]:
    """The moves between different ranks in rounds: in each, no rank sends or gets more than `wave_bytes`.

    Every rank computes the same rounds. Large moves are cut so that rounds fill up; each part goes
    into the first round where both ranks have room. Raises `ValueError` below 64 bytes.
    """
    if wave_bytes < 4 * _ALIGN:
        raise ValueError(f"a wave of {wave_bytes} bytes holds no four parts of {_ALIGN} bytes")
    largest = wave_bytes // (4 * _ALIGN) * _ALIGN
    rounds: list[list[Move]] = []
    sends, gets = _Loads(wave_bytes - largest), _Loads(wave_bytes - largest)
    for move in moves:
        if move.source == move.target:
            continue
        for part in _cut(move, largest):
            number = max(sends.first_open(part.source), gets.first_open(part.target))
            while not (sends.open(part.source, number) and gets.open(part.target, number)):
                number += 1
            while number >= len(rounds):
                rounds.append([])
            rounds[number].append(part)
            sends.add(part.source, number, _padded(part.bytes))
            gets.add(part.target, number, _padded(part.bytes))
    return rounds


class _Loads:
    """Bytes by rank and round. A round is open to a rank while its load there leaves room for any part."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes: dict[tuple[int, int], int] = {}
        self._first: dict[int, int] = {}

    def open(self, rank: int, number: int) -> bool:
        return self._bytes.get((rank, number), 0) <= self._limit

    def first_open(self, rank: int) -> int:
        return self._first.get(rank, 0)

    def add(self, rank: int, number: int, size: int) -> None:
        self._bytes[rank, number] = self._bytes.get((rank, number), 0) + size
        first = self.first_open(rank)
        while not self.open(rank, first):
            first += 1
        self._first[rank] = first


def _cut(move: Move, largest: int) -> list[Move]:
    """The move in parts of at most `largest` bytes."""
    if move.bytes <= largest:
        return [move]
    step = largest // move.dtype.itemsize
    total = move.box.elements
    return [
        replace(move, box=box.shift(move.box.offsets))
        for start in range(0, total, step)
        for box in flat_range(move.box.sizes, start, min(start + step, total))
    ]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Exchange:
    """Runs waves: packs what this rank sends, swaps with all ranks at once, unpacks what it gets.

    Buffers live on `device` (the process group must reach it) and are kept between waves.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._out = torch.empty(0, dtype=torch.uint8, device=device)
        self._in = torch.empty(0, dtype=torch.uint8, device=device)

    def run(
        self,
        wave: Sequence[Move],
        read: Callable[[Move], Tensor],
        write: Callable[[Move, Tensor], None],
    ) -> None:
        """One wave, the same on every rank. Collective.

        `read` gives the elements of a move that this rank sends, in any dtype and on any device;
        `write` takes those of a move that it gets, in the move's dtype, valid until it returns.
        """
        rank, world = self._layout.rank, self._layout.world
        going = sorted((m for m in wave if m.source == rank), key=lambda m: m.target)
        coming = sorted((m for m in wave if m.target == rank), key=lambda m: m.source)
        send_sizes, get_sizes = [0] * world, [0] * world
        for move in going:
            send_sizes[move.target] += _padded(move.bytes)
        for move in coming:
            get_sizes[move.source] += _padded(move.bytes)
        self._out, self._in = _room(self._out, sum(send_sizes)), _room(self._in, sum(get_sizes))
        out, into = self._out[: sum(send_sizes)], self._in[: sum(get_sizes)]
        for move, part in _parts(going, out):
            part.copy_(read(move))
        dist.all_to_all_single(into, out, get_sizes, send_sizes)
        for move, part in _parts(coming, into):
            write(move, part)


def _room(buffer: Tensor, size: int) -> Tensor:
    return buffer if buffer.numel() >= size else buffer.new_empty(size)


def _parts(moves: Sequence[Move], buffer: Tensor) -> Iterable[tuple[Move, Tensor]]:
    """Each move with its place in the buffer, viewed as its dtype and shape."""
    start = 0
    for move in moves:
        flat = buffer[start : start + move.bytes].view(move.dtype)
        yield move, flat.view(move.box.sizes)
        start += _padded(move.bytes)


class Transfer:
    """A redistribution of shards, planned once and run as often as the same layouts meet again.

    Making one is collective (ranks tell each other their pieces); nothing of the tensors is kept.
    """

    def __init__(
        self,
        have: Iterable[Shard],
        want: Iterable[Shard],
        layout: Layout,
        wave_bytes: int = WAVE_BYTES,
    ) -> None:
        have = list(have)
        self._have = [Piece.of(shard) for shard in have]
        self._want = [Piece.of(shard) for shard in want]
        device = accelerator_of(have)
        everyone = gather_objects((self._have, self._want, device), layout)
        moves = plan([theirs[0] for theirs in everyone], [theirs[1] for theirs in everyone])
        self._own = [m for m in moves if m.source == m.target == layout.rank]
        self._waves = waves(moves, wave_bytes)
        self._device = meeting_place([theirs[2] for theirs in everyone], device)
        self._layout = layout

    def run(self, have: Iterable[Shard], want: Iterable[Shard]) -> None:
        """Write every wanted shard's tensor, converting to its dtype. Collective.

        The shards are those the plan was made for, in the same order, with whatever memory they
        have by now; `ValueError` when they are not. Buffers take at most two waves and are freed.
        """
        have, want = list(have), list(want)
        if [Piece.of(s) for s in have] != self._have or [Piece.of(s) for s in want] != self._want:
            raise ValueError("the shards are not those that the transfer was planned for")

        def read(move: Move) -> Tensor:
            return _part(have[move.have], move.box)

        def write(move: Move, elements: Tensor) -> None:
            _part(want[move.want], move.box).copy_(elements)

        with torch.no_grad():
            for move in self._own:
                write(move, read(move))
            exchange = Exchange(self._layout, self._device)
            for wave in self._waves:
                exchange.run(wave, read, write)


def _part(shard: Shard, box: Box) -> Tensor:
    """The shard's elements in a box given in global coordinates, as a view."""
    if box == shard.box:
        return shard.tensor
    return shard.tensor[box.relative_to(shard.box).slices]


def accelerator_of(shards: Iterable[Shard]) -> torch.device | None:
    """The accelerator that holds the first shard that is on one; None when all are on the CPU."""
    return next((s.tensor.device for s in shards if s.tensor.device.type != "cpu"), None)


def meeting_place(
    devices: Sequence[torch.device | None], mine: torch.device | None
) -> torch.device:
    """Where an `Exchange` has its buffers, given every rank's `accelerator_of` what it sends: there, or on the CPU."""
    if mine is not None:
        return mine
    kind = next((device.type for device in devices if device is not None), "cpu")
    return torch.device(kind)
