"""Carry out a plan between ranks, in rounds of bounded bytes. Elements travel in the wanted dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.boxes.pieces import Piece, PieceTable, gather_pieces
from burnish.boxes.plan import ALIGN, WAVE_BYTES, Move, plan, schedule
from burnish.boxes.shards import Shard
from burnish.distributed.collectives import gather_objects
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout


class Exchange:
    """Run rounds: pack outgoing boxes, exchange them all-to-all, unpack incoming boxes.

    The buffer is on `device`, which the process group must support. In host memory it comes from the `arena`, if any.
    """

    def __init__(self, layout: Layout, device: torch.device, arena: Arena | None = None) -> None:
        self._layout = layout
        self._take: Callable[[int], Tensor] = partial(torch.empty, dtype=torch.uint8, device=device)
        if arena is not None and device.type == "cpu":
            self._take = arena.take
        self._buffer = self._take(0)

    def run(
        self,
        wave: Sequence[Move],
        read: Callable[[Move, Tensor], object],
        write: Callable[[Move, Tensor], object],
    ) -> None:
        """Run this rank's moves of one round. Collective.

        `read` writes an outgoing move's elements into memory. `write` gets an incoming move's, which are valid until it returns.
        """
        rank = self._layout.rank
        world = self._layout.world
        outgoing = sorted((m for m in wave if m.source == rank), key=lambda m: m.target)
        incoming = sorted((m for m in wave if m.target == rank), key=lambda m: m.source)
        send_sizes = [0] * world
        receive_sizes = [0] * world
        for move in outgoing:
            send_sizes[move.target] += _aligned(move.bytes)
        for move in incoming:
            receive_sizes[move.source] += _aligned(move.bytes)
        outgoing_bytes = sum(send_sizes)
        buffer = self._resized(outgoing_bytes + sum(receive_sizes))
        out = buffer[:outgoing_bytes]
        into = buffer[outgoing_bytes:]
        for move, part in _parts(outgoing, out):
            read(move, part)
        dist.all_to_all_single(into, out, receive_sizes, send_sizes)
        for move, part in _parts(incoming, into):
            write(move, part)

    def _resized(self, size: int) -> Tensor:
        if self._buffer.numel() < size:
            self._buffer = self._take(0)  # free the old buffer before taking a larger one
            self._buffer = self._take(size)
        return self._buffer[:size]


def _parts(moves: Sequence[Move], buffer: Tensor) -> Iterable[tuple[Move, Tensor]]:
    start = 0
    for move in moves:
        flat = buffer[start : start + move.bytes].view(move.dtype)
        yield move, flat.view(move.box.sizes)
        start += _aligned(move.bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Transfer:
    """Redistribute shards between two layouts: planned once, collectively; run any number of times."""

    def __init__(
        self,
        have: Iterable[Shard],
        want: Iterable[Shard],
        layout: Layout,
        wave_bytes: int = WAVE_BYTES,
    ) -> None:
        have = list(have)
        self._have = pieces_of(have)
        self._want = pieces_of(want)
        device = accelerator_of(have)
        devices = gather_objects(device, layout)
        tables = [gather_pieces(PieceTable.of(side), layout) for side in (self._have, self._want)]
        [[self._moves]] = schedule(plan(*tables), [layout.rank], wave_bytes)
        self._device = meeting_place(devices, device)
        self._layout = layout

    def run(self, have: Iterable[Shard], want: Iterable[Shard]) -> None:
        """Write every wanted shard's tensor, converting to its dtype. Collective. Buffers take at most two waves.

        Raises `ValueError` for unplanned shards.
        """
        have = list(have)
        want = list(want)
        if pieces_of(have) != self._have or pieces_of(want) != self._want:
            raise ValueError("the shards are not those that the transfer was planned for")

        def read(move: Move, into: Tensor) -> None:
            into.copy_(have[move.have].part(move.box))

        def write(move: Move, elements: Tensor) -> None:
            want[move.want].part(move.box).copy_(elements)

        with torch.no_grad():
            for move in self._moves.own:
                read(move, want[move.want].part(move.box))
            exchange = Exchange(self._layout, self._device)
            for wave in self._moves.waves:
                exchange.run(wave, read, write)


def pieces_of(shards: Iterable[Shard]) -> list[Piece]:
    """Return shards as pieces, with their memory's dtype."""
    return [(shard.spec._replace(dtype=shard.tensor.dtype), shard.box) for shard in shards]


def accelerator_of(shards: Iterable[Shard]) -> torch.device | None:
    """Return the device of the first shard on an accelerator, or None."""
    return next((s.tensor.device for s in shards if s.tensor.device.type != "cpu"), None)


def meeting_place(
    devices: Sequence[torch.device | None], own_device: torch.device | None
) -> torch.device:
    """Choose an `Exchange`'s device from every rank's `accelerator_of`."""
    if own_device is not None:
        return own_device
    kind = next((device.type for device in devices if device is not None), "cpu")
    return torch.device(kind)
