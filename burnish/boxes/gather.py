"""Bring whole tensors to every rank, a bounded number of bytes at a time.

A plan has a row for each piece that a rank holds, not one for each pair of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from burnish.boxes.box import Box, whole
from burnish.boxes.pieces import PieceTable, TensorIndex, gather_pieces
from burnish.boxes.plan import Cover, Moves
from burnish.boxes.rounds import ALIGN, WAVE_BYTES, cut
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.table import Ints
from burnish.boxes.transfer import accelerator_of, meeting_place, pieces_of
from burnish.distributed.collectives import all_gather, gather_objects
from burnish.distributed.layout import Layout


class _Part(NamedTuple):
    """Elements that go out at once: as many of each of `ranks`, whose rows follow each other."""

    spec: TensorSpec
    box: Box
    """The first rank's elements."""
    ranks: range
    """Empty where every rank has them all."""
    have: tuple[int, ...]
    """The piece of each of these ranks, or else this rank's own."""
    start: int
    """Where a rank's message has them, in bytes."""

    @property
    def bytes(self) -> int:
        """Return the size of a rank's elements."""
        return self.box.elements * self.spec.dtype.itemsize

    @property
    def all(self) -> Box:
        """Return the elements of all of `ranks`."""
        if len(self.ranks) < 2:
            return self.box
        rows, *sizes = self.box.sizes
        return Box(self.box.offsets, (rows * len(self.ranks), *sizes))

    def of(self, number: int) -> Box:
        """Return the elements of the rank at place `number`."""
        if number == 0:
            return self.box
        rows, *columns = self.box.offsets
        return Box((rows + number * self.box.sizes[0], *columns), self.box.sizes)


class Gather:
    """Give every rank all of the wanted tensors: planned once, run any number of times. Keeps no tensors."""

    def __init__(
        self,
        have: Iterable[Shard],
        want: Sequence[TensorSpec],
        layout: Layout,
        wave_bytes: int = WAVE_BYTES,
    ) -> None:
        """Plan from this rank's pieces. Collective; `want` is the same on all ranks.

        Raises `MissingError` for what nobody holds, and `IncompatibleError` for another shape.
        """
        have = list(have)
        self._have, self._layout = pieces_of(have), layout
        device = accelerator_of(have)
        self._device = meeting_place(gather_objects(device, layout), device)
        self._machines = layout.machines if self._device.type == "cpu" else ()
        size = layout.local_world if self._machines else 1
        order = np.arange(layout.world).reshape(-1, size).T.ravel()
        self._rows = torch.from_numpy(np.argsort(order))
        """By rank: its row in the messages. Those with one place on all machines follow each other."""
        tables = gather_pieces(PieceTable.of(self._have), layout)
        self._waves = waves_of(tables, want, layout.rank, wave_bytes)

    def run(self, have: Iterable[Shard]) -> Iterator[Shard]:
        """Yield pieces that make up the wanted tensors, one tensor after the other, in the wanted dtype. Collective.

        A piece is valid until the next is asked for, and what a rank has itself is a view. All ranks must take all. Raises
        `ValueError` unless the shards are those of the plan, in its order.
        """
        have = list(have)
        if pieces_of(have) != self._have:
            raise ValueError("the shards are not those that the gathering was planned for")
        for parts, sizes in self._waves:
            room = self._exchanged(have, parts, sizes)
            for part in parts:
                held = (
                    self._elements(room, part) if part.ranks else have[part.have[0]].part(part.box)
                )
                yield Shard(part.spec, part.all, held.reshape(part.all.sizes).to(part.spec.dtype))

    @torch.no_grad()
    def _exchanged(self, have: Sequence[Shard], parts: Sequence[_Part], sizes: Ints) -> Tensor:
        """Return the messages [ranks, bytes] of a wave; `sizes` are their lengths."""
        rank, world, longest = self._layout.rank, self._layout.world, int(sizes.max())
        own = int(self._rows[rank])
        room = torch.empty(world, longest, dtype=torch.uint8, device=self._device)
        for part in parts:
            if rank in part.ranks:
                number = part.ranks.index(rank)
                mine = have[part.have[number]].part(part.of(number))
                into = room[own, part.start : part.start + part.bytes].view(part.spec.dtype)
                into.view(mine.shape).copy_(mine)
        if not longest:
            return room
        if longest * world <= 2 * int(sizes.sum()):
            self._gather(room, own)
        else:  # few ranks have anything, as the stages of a pipeline
            for sender in np.flatnonzero(sizes).tolist():
                self._broadcast(room[int(self._rows[sender]), : sizes[sender]], sender)
        return room

    def _gather(self, room: Tensor, own: int) -> None:
        """Fill all rows of the messages from this rank's own. Each machine gets others' once."""
        if not self._machines:
            all_gather(room.view(-1), room[own].clone())
            return
        within, across = self._machines
        column = room.view(within.size(), across.size(), -1)[within.rank()]
        all_gather(column.view(-1), room[own].clone(), group=across)
        all_gather(room.view(-1), column.clone().view(-1), group=within)

    def _broadcast(self, message: Tensor, sender: int) -> None:
        """Fill a message from its sender's; each machine gets it once."""
        if not self._machines:
            dist.broadcast(message, sender)
            return
        within, across = self._machines
        if within.rank() == sender % within.size():
            dist.broadcast(message, sender, across)
        dist.broadcast(message, group=within, group_src=sender % within.size())

    def _elements(self, room: Tensor, part: _Part) -> Tensor:
        """Return the elements of a part in the messages, [ranks, *sizes of its box]; a view, unless machines share them."""
        ranks = slice(part.ranks.start, part.ranks.stop)
        rows = room[:, part.start : part.start + part.bytes][
            self._rows[ranks] if self._machines else ranks
        ]
        return rows.view(part.spec.dtype).view(-1, *part.box.sizes)


def waves_of(
    tables: Sequence[PieceTable], want: Sequence[TensorSpec], rank: int, wave_bytes: int
) -> list[tuple[list[_Part], Ints]]:
    """Return the parts of each wave and the bytes of each rank's message, given every rank's pieces."""
    tensors, world = TensorIndex(), len(tables)
    asked = PieceTable.of((spec, whole(spec.shape)) for spec in want)
    held, wanted = tensors.merge(tables, [asked])
    moves, everywhere = Cover.of(held, wanted, tensors).in_turn(rank, world)
    if not everywhere.all():
        moves, everywhere = cut(moves, everywhere, wave_bytes)
    upto = np.cumsum(np.where(everywhere, 0, moves.bytes))
    wave = np.maximum(upto - 1, 0) // wave_bytes
    return [
        _parts(moves.take(wave == number), everywhere[wave == number], world)
        for number in np.unique(wave)
    ]


def _parts(moves: Moves, everywhere: Ints, world: int) -> tuple[list[_Part], Ints]:
    """Return the parts of a wave, and the bytes of each rank's message.

    Ranks in a row whose pieces are equal and lie one below the other, as FSDP cuts them, send one part.
    """
    begins, boxes = np.flatnonzero(~_joins(moves, everywhere)).tolist(), moves.boxes
    runs: list[_Part] = []
    for first, stop in pairwise([*begins, len(moves)]):
        number, source = boxes.tensor[first], int(moves.source[first])
        name, shape = moves.tensors.names[number], moves.tensors.shapes[number]
        spec = TensorSpec(name, shape, moves.tensors.dtypes[moves.dtype[first]])
        ranks = range(0) if everywhere[first] else range(source, source + stop - first)
        have = tuple(moves.have[first:stop].tolist())
        runs.append(_Part(spec, boxes.box(first, len(shape)), ranks, have, 0))
    ends, parts = np.zeros(world, np.int64), list[_Part]()
    for part in runs:
        rows = slice(part.ranks.start, part.ranks.stop)
        start = int(ends[rows].max(initial=0))
        ends[rows] = start + -(-part.bytes // ALIGN) * ALIGN
        parts.append(part._replace(start=start))
    return parts, ends


def _joins(moves: Moves, everywhere: Ints) -> NDArray[np.bool_]:
    """Return which moves go on where the one before ends: the next rank has as many rows below."""
    found, boxes = np.zeros(len(moves), bool), moves.boxes
    row = boxes.offsets.copy()
    row[:, 0] -= boxes.sizes[:, 0]
    found[1:] = (row[1:, 0] == boxes.offsets[:-1, 0]) & (np.diff(moves.source) == 1)
    found[1:] &= (row[1:, 1:] == boxes.offsets[:-1, 1:]).all(axis=1)
    found[1:] &= (boxes.sizes[1:] == boxes.sizes[:-1]).all(axis=1)
    for column in (boxes.tensor, moves.dtype, everywhere):
        found[1:] &= column[1:] == column[:-1]
    found &= everywhere == 0
    return found


def assembled(pieces: Iterable[Shard]) -> Iterator[Shard]:
    """Join the pieces of each tensor, which follow each other; yield whole tensors. Those in one piece are not copied."""
    for spec, group in groupby(pieces, lambda piece: piece.spec):
        tensor: Tensor | None = None
        for piece in group:
            if piece.box == whole(spec.shape):
                tensor = piece.tensor
                break
            if tensor is None:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=piece.tensor.device)
            tensor[piece.box.slices] = piece.tensor
        if tensor is not None:
            yield Shard(spec, whole(spec.shape), tensor)
