"""Bring whole tensors to every rank, a bounded number of bytes at a time. Tensors that are cut alike share a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from burnish.boxes.box import Box, whole
from burnish.boxes.pieces import PieceTable, TensorIndex, alike_tensors, gather_pieces
from burnish.boxes.plan import ALIGN, WAVE_BYTES, Coverage, Moves, cut
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.table import Ints
from burnish.boxes.transfer import accelerator_of, meeting_place, pieces_of
from burnish.distributed.collectives import all_gather, gather_objects
from burnish.distributed.layout import Layout


class _Part(NamedTuple):
    """A box that one wave sends. Each of `ranks` sends equally many of its rows, in rank order."""

    spec: TensorSpec
    box: Box
    """The elements that the first rank sends."""
    ranks: range
    """The senders; empty if every rank holds all the elements already."""
    piece: int
    """Index of the piece with this rank's elements of the part; -1 if the rank has none."""
    start: int
    """Offset of the elements in each sender's message, in bytes."""

    @property
    def bytes(self) -> int:
        return self.box.elements * self.spec.dtype.itemsize

    @property
    def all(self) -> Box:
        if len(self.ranks) < 2:
            return self.box
        rows, *sizes = self.box.sizes
        return Box(self.box.offsets, (rows * len(self.ranks), *sizes))

    def of(self, number: int) -> Box:
        if number == 0:
            return self.box
        rows, *columns = self.box.offsets
        return Box((rows + number * self.box.sizes[0], *columns), self.box.sizes)


class Gather:
    """Give every rank all wanted tensors: planned once, run any number of times."""

    def __init__(
        self,
        have: Iterable[Shard],
        want: Sequence[TensorSpec],
        layout: Layout,
        wave_bytes: int = WAVE_BYTES,
    ) -> None:
        """Plan from this rank's pieces. Collective; `want` is the same on all ranks.

        Raises as `burnish.boxes.plan.plan` does.
        """
        have = list(have)
        self._have = pieces_of(have)
        self._layout = layout
        device = accelerator_of(have)
        self._device = meeting_place(gather_objects(device, layout), device)
        self._machines = layout.machines if self._device.type == "cpu" else ()
        size = layout.local_world if self._machines else 1
        order = np.arange(layout.world).reshape(-1, size).T.ravel()
        self._rows = torch.from_numpy(np.argsort(order))
        """By rank, its row in the buffer of messages. Ranks with the same index on their machines have adjacent rows."""
        by_name: dict[str, list[int]] = {}
        for number, (spec, _) in enumerate(self._have):
            by_name.setdefault(spec.name, []).append(number)
        own = [by_name.get(spec.name, []) for spec in want]
        alike = alike_tensors([[self._have[n] for n in each] for each in own], want, layout)
        first = [self._have[n] for number in sorted({*alike}) for n in own[number]]
        tables = gather_pieces(PieceTable.of(first), layout)
        self._waves = waves_of(tables, want, alike, own, layout.rank, wave_bytes)

    def run(self, have: Iterable[Shard]) -> Iterator[Shard]:
        """Yield pieces of the wanted tensors, one tensor after the other, in the wanted dtype. Collective; every rank must
        exhaust the iterator.

        A piece may be a view; it is valid until the next one. Raises `ValueError` for unplanned shards.
        """
        have = list(have)
        if pieces_of(have) != self._have:
            raise ValueError("the shards are not those that the gathering was planned for")
        for parts, sizes in self._waves:
            yield from self._wave(have, parts, sizes)

    def _wave(self, have: Sequence[Shard], parts: Sequence[_Part], sizes: Ints) -> Iterator[Shard]:
        sent = self._messages(have, parts, sizes)
        for part in parts:
            elements = self._elements(have, sent, part)
            shape = part.all.sizes
            # No name for a copy, so that it is free when the receiver has read it.
            yield Shard(part.spec, part.all, elements.reshape(shape).to(part.spec.dtype))

    @torch.no_grad()
    def _messages(
        self, have: Sequence[Shard], parts: Sequence[_Part], sizes: Ints
    ) -> Tensor | dict[int, Tensor]:
        """Return a wave's messages [ranks, bytes], or by rank if few ranks send anything; `sizes` are their lengths."""
        rank = self._layout.rank
        world = self._layout.world
        longest = int(sizes.max())
        total = int(sizes.sum())
        take = partial(torch.empty, dtype=torch.uint8, device=self._device)
        if longest * world < 2 * total:
            sent = take((world, longest))
            own_row = int(self._rows[rank])
            self._pack(have, parts, sent[own_row])
            self._gather(sent, own_row)
            return sent
        # Of one long tensor, or of a pipeline's stage, few ranks send a part. Broadcasts move fewer bytes, and the others need no
        # rows, which would take as many waves as there are ranks.
        senders = np.flatnonzero(sizes).tolist()
        rows = torch.split(take(total), sizes[senders].tolist()) if senders else ()
        messages = dict(zip(senders, rows, strict=True))
        if rank in messages:
            self._pack(have, parts, messages[rank])
        for sender, message in messages.items():
            self._broadcast(message, sender)
        return messages

    def _pack(self, have: Sequence[Shard], parts: Sequence[_Part], message: Tensor) -> None:
        """Write this rank's message of a wave."""
        for part in parts:
            if self._layout.rank in part.ranks:
                number = part.ranks.index(self._layout.rank)
                own_elements = have[part.piece].part(part.of(number))
                into = message[part.start : part.start + part.bytes].view(part.spec.dtype)
                into.view(own_elements.shape).copy_(own_elements)

    def _gather(self, sent: Tensor, own_row: int) -> None:
        if not self._machines:
            all_gather(sent.view(-1), sent[own_row].clone())
            return
        within, across = self._machines
        column = sent.view(within.size(), across.size(), -1)[within.rank()]
        all_gather(column.view(-1), sent[own_row].clone(), group=across)
        all_gather(sent.view(-1), column.clone().view(-1), group=within)

    def _broadcast(self, message: Tensor, sender: int) -> None:
        if not self._machines:
            dist.broadcast(message, sender)
            return
        within, across = self._machines
        if within.rank() == sender % within.size():
            dist.broadcast(message, sender, across)
        dist.broadcast(message, group=within, group_src=sender % within.size())

    def _elements(
        self, have: Sequence[Shard], sent: Tensor | dict[int, Tensor], part: _Part
    ) -> Tensor:
        """Return a part's elements, [ranks, *sizes of its box] in the messages."""
        if not part.ranks:
            return have[part.piece].part(part.box)
        bytes_ = slice(part.start, part.start + part.bytes)
        if isinstance(sent, dict):
            of_ranks = [sent[rank][bytes_] for rank in part.ranks]
            rows = torch.stack(of_ranks) if len(of_ranks) > 1 else of_ranks[0][None]
        else:
            ranks = slice(part.ranks.start, part.ranks.stop)
            rows = sent[:, bytes_][self._rows[ranks] if self._machines else ranks]
        return rows.view(part.spec.dtype).view(-1, *part.box.sizes)


def waves_of(
    tables: Sequence[PieceTable],
    want: Sequence[TensorSpec],
    alike: Sequence[int],
    own: Sequence[Sequence[int]],
    rank: int,
    wave_bytes: int,
) -> list[tuple[list[_Part], Ints]]:
    """Return the parts of each wave and the bytes of each rank's message.

    `alike` has per wanted tensor the first tensor cut alike, `own` this rank's pieces. `tables` has all ranks' pieces of the first ones.
    """
    tensors = TensorIndex()
    world = len(tables)
    first = sorted({*alike})
    whole_tensors = PieceTable.of((want[n], whole(want[n].shape)) for n in first)
    held_pieces, wanted_pieces = tensors.merge(tables, [whole_tensors])
    cover = Coverage.of(held_pieces, wanted_pieces, tensors)
    rows = {number: row for row, number in enumerate(first)}
    places = [place for number in first for place in range(len(own[number]))]
    by_turn: dict[int, list[list[_Part]]] = {}
    waves = list[tuple[int, list[_Part]]]()
    upto = 0
    turns = cover.turns
    for number, spec in enumerate(want):
        turn = number % turns
        if turn not in by_turn:
            by_turn[turn] = _runs(*cover.in_turn(rank, world, turn), rank, len(first), wave_bytes)
        for run in by_turn[turn][rows[alike[number]]]:
            piece = own[number][places[run.piece]] if run.piece >= 0 else -1
            for wave, part in _by_wave(run._replace(spec=spec, piece=piece), upto, wave_bytes):
                if not waves or waves[-1][0] != wave:
                    waves.append((wave, []))
                waves[-1][1].append(part)
            upto += len(run.ranks) * run.bytes
    return [_with_offsets(parts, world) for _, parts in waves]


def _runs(
    moves: Moves, everywhere: Ints, rank: int, rows: int, wave_bytes: int
) -> list[list[_Part]]:
    """Return the parts of each wanted row; `piece` is a row of this rank's table.

    Neighbouring ranks whose equal pieces are stacked by rows, as FSDP cuts them, share one part.
    """
    if not everywhere.all():
        moves, everywhere = cut(moves, everywhere, wave_bytes)
    parts_by_row: list[list[_Part]] = [[] for _ in range(rows)]
    begins = np.flatnonzero(~_continues(moves, everywhere)).tolist()
    boxes = moves.boxes
    for first, stop in pairwise([*begins, len(moves)]):
        number = boxes.tensor[first]
        source = int(moves.source[first])
        name = moves.tensors.names[number]
        shape = moves.tensors.shapes[number]
        spec = TensorSpec(name, shape, moves.tensors.dtypes[moves.dtype[first]])
        ranks = range(0) if everywhere[first] else range(source, source + stop - first)
        has_elements = everywhere[first] or rank in ranks
        piece = int(moves.have[first + len(ranks[: rank - source])]) if has_elements else -1
        part = _Part(spec, boxes.box(first, len(shape)), ranks, piece, 0)
        parts_by_row[moves.want[first]].append(part)
    return parts_by_row


def _by_wave(part: _Part, upto: int, wave_bytes: int) -> Iterator[tuple[int, _Part]]:
    """Cut a part where waves end. A rank's elements belong to the wave in which they end."""
    first = 0
    size = part.bytes
    if not part.ranks:
        yield max(upto - 1, 0) // wave_bytes, part
    while first < len(part.ranks):
        wave = (upto + (first + 1) * size - 1) // wave_bytes
        stop = min(len(part.ranks), ((wave + 1) * wave_bytes - upto) // size)
        yield wave, part._replace(box=part.of(first), ranks=part.ranks[first:stop])
        first = stop


def _with_offsets(parts: Sequence[_Part], world: int) -> tuple[list[_Part], Ints]:
    ends = np.zeros(world, np.int64)
    placed_parts = list[_Part]()
    for part in parts:
        rows = slice(part.ranks.start, part.ranks.stop)
        start = int(ends[rows].max(initial=0))
        ends[rows] = start + -(-part.bytes // ALIGN) * ALIGN
        placed_parts.append(part._replace(start=start))
    return placed_parts, ends


def _continues(moves: Moves, everywhere: Ints) -> NDArray[np.bool_]:
    """Mark moves that continue the move before: next rank, next rows."""
    continues = np.zeros(len(moves), bool)
    boxes = moves.boxes
    row = boxes.offsets.copy()
    row[:, 0] -= boxes.sizes[:, 0]
    continues[1:] = (row[1:, 0] == boxes.offsets[:-1, 0]) & (np.diff(moves.source) == 1)
    continues[1:] &= (row[1:, 1:] == boxes.offsets[:-1, 1:]).all(axis=1)
    continues[1:] &= (boxes.sizes[1:] == boxes.sizes[:-1]).all(axis=1)
    for column in (boxes.tensor, moves.dtype, everywhere):
        continues[1:] &= column[1:] == column[:-1]
    continues &= everywhere == 0
    return continues


def assembled(pieces: Iterable[Shard]) -> Iterator[Shard]:
    """Join consecutive pieces of each tensor. A whole tensor is not copied."""
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
