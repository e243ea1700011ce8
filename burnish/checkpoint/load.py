"""Filling shards from a committed step, at whatever layout it is wanted.

The plan of saving the other way round: what ranks want are the engine's shards, what they have are
the blocks of files that they read. Each block is read by one rank, checked against its hash, and
its elements go to whoever wants them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.checkpoint.blocks import Block, Part, PlannedFile, parts_of
from burnish.checkpoint.committed import Committed
from burnish.checkpoint.dtypes import BY_NAME
from burnish.checkpoint.relay import GROUP_BLOCKS, Relay
from burnish.checkpoint.split import add_residual
from burnish.checkpoint.tensor_sets import MAIN, MODEL, RESIDUAL, prefix_of, roles_in, set_of
from burnish.checkpoint.verify import checked_header, read_block
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import TensorEntry
from burnish.files.storage import LocalStorage, ReadableFile, Source
from burnish.parallel.collectives import agree, gather_objects
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Piece, Shard
from burnish.parallel.transfer import Move, plan


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies."""

    file: int
    entry: TensorEntry


class CheckpointSource:
    """The tensors of a committed step's model; a `ShardSource` for weights and optimizer slots alike.

    The model is the run's own; `of` gives any other. A shard's name is that of a weight, or `slot/weight`. Every rank makes one and calls `fill`
    together. fp32 weights that were split come back bit for bit; other dtypes are converted from
    what `model/` holds. Holds 32 MiB beside the tensors, and the same again for what ranks pass on.
    """

    def __init__(self, committed: Committed, layout: Layout, storage: Source | None = None) -> None:
        self._step = committed
        self._layout = layout
        self._storage = storage or LocalStorage()
        with agree(layout):
            self._files = [
                self._open(name, tensor_set)
                for name in sorted(committed.manifest.files)
                if (tensor_set := set_of(name)) is not None
            ]
        self._places = {
            f"{file.tensor_set}/{entry.name}": _Place(index, entry)
            for index, file in enumerate(self._files)
            for entry in file.entries
        }
        self._sets = {file.tensor_set for file in self._files}
        self._prefix = prefix_of(MAIN)

    def of(self, role: str) -> CheckpointSource:
        """The same step's tensors of another trained model. Raises `MissingError` where it has none of that role."""
        prefix = prefix_of(role)
        if f"{prefix}{MODEL}" not in self._sets:
            roles = roles_in(self._step.manifest.files)
            raise MissingError(
                f"{self._step.path} holds no {role}",
                have=", ".join(each or "the run's own model" for each in roles) or "no model",
                want=f"{role}/{MODEL} and {role}/training",
                do=f"resume a run that trains a {role}; a new run may start from this one's model directories",
            )
        other = copy.copy(self)
        other._prefix = prefix
        return other

    def fill(self, shards: Iterable[Shard]) -> None:
        """Write each shard's tensor in place, converting to its dtype. Collective, errors included.

        Raises `MissingError` for a tensor that the step lacks, `IncompatibleError` for one of
        another shape or an unknown dtype, `CorruptError` naming file and tensor for a damaged block.
        """
        shards = list(shards)
        with agree(self._layout):
            keys = [self._checked(shard) for shard in shards]
        self._deliver(shards, keys, _copy)
        exact = [
            (shard, f"{self._prefix}{RESIDUAL}/{shard.spec.name}")
            for shard, key in zip(shards, keys, strict=True)
            if key.startswith(f"{self._prefix}{MODEL}/")
            and f"{self._prefix}{RESIDUAL}/{shard.spec.name}" in self._places
            and shard.tensor.dtype == torch.float32
        ]
        self._deliver([shard for shard, _ in exact], [key for _, key in exact], add_residual)

    def _open(self, name: str, tensor_set: str) -> PlannedFile:
        header = checked_header(self._step, name, self._storage)
        for entry in header.entries.values():
            if entry.dtype not in BY_NAME:
                raise IncompatibleError(
                    f"tensor {entry.name} in {self._step.path / name} has an unknown dtype",
                    have=entry.dtype,
                    want=", ".join(BY_NAME),
                    do="resume with the version of Burnish that wrote it",
                )
            if entry.begin % BY_NAME[entry.dtype].itemsize:
                raise CorruptError(f"tensor {entry.name} in {self._step.path / name} is misplaced")
        entries = tuple(header.entries.values())
        return PlannedFile(name, tensor_set, b"", entries, self._step.manifest.files[name].size)

    def _checked(self, shard: Shard) -> str:
        """The key of the stored tensor that a shard is a piece of."""
        name = shard.spec.name
        first = f"{self._prefix}{name.partition('/')[0]}"
        is_slot = first in self._sets - {f"{self._prefix}{MODEL}"}
        key = f"{self._prefix}{name}" if is_slot else f"{self._prefix}{MODEL}/{name}"
        if key not in self._places:
            raise MissingError(
                f"{self._step.path} has no tensor {name}",
                have=f"{len(self._places)} tensors: {', '.join(sorted(self._sets))}",
                want=name,
                do="resume with the model and optimizer that wrote it",
            )
        entry = self._places[key].entry
        if entry.shape != shard.spec.shape:
            raise IncompatibleError(
                f"tensor {name} in {self._step.path} has another shape than the model's",
                have=list(entry.shape),
                want=list(shard.spec.shape),
                do="resume with the model that wrote it",
            )
        return key

    def _deliver(
        self,
        shards: Sequence[Shard],
        keys: Sequence[str],
        put: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Read what all ranks want of the tensors with these keys; `put(mine, elements)` each piece."""
        pieces = [
            Piece(key, shard.spec.shape, shard.box, BY_NAME[self._places[key].entry.dtype])
            for shard, key in zip(shards, keys, strict=True)
        ]
        want = gather_objects(pieces, self._layout)
        reading = _Reading(self._files, self._shares(want), want, self._layout)

        def write(move: Move, elements: Tensor) -> None:
            shard = shards[move.want]
            mine = shard.tensor.detach()[move.box.relative_to(shard.box).slices]
            put(mine, elements)

        with ExitStack() as opened:
            files: dict[int, ReadableFile] = {}
            for group in range(reading.groups):
                with agree(self._layout):
                    for slot, block in reading.blocks(group):
                        name = self._files[block.file].path
                        if block.file not in files:
                            file = self._storage.open(self._step.path / name)
                            files[block.file] = opened.enter_context(file)
                        read_block(files[block.file], self._step, name, block.number, slot)
                reading.relay.run(group, reading.read, write)

    def _shares(self, want: Sequence[Sequence[Piece]]) -> list[list[Block]]:
        """Who reads which block: of the ranks that want any of it, the one that reads least so far."""
        wanting: dict[Block, list[int]] = {}
        for rank, pieces in enumerate(want):
            for block in {block for piece in pieces for block in self._blocks(piece)}:
                wanting.setdefault(block, []).append(rank)
        shares: list[list[Block]] = [[] for _ in want]
        for block in sorted(wanting, key=lambda block: (block.file, block.number)):
            min((shares[rank] for rank in wanting[block]), key=len).append(block)
        return shares

    def _blocks(self, piece: Piece) -> Iterator[Block]:
        """The blocks from the first to the last byte of a piece."""
        if piece.box.elements == 0:
            return
        place = self._places[piece.name]
        file = self._files[place.file]
        block_bytes = self._step.manifest.files[file.path].block_bytes
        first, last = _span(piece)
        begin = place.entry.begin + first * piece.dtype.itemsize
        end = place.entry.begin + last * piece.dtype.itemsize
        for number in range(begin // block_bytes, -(-end // block_bytes)):
            start = number * block_bytes
            yield Block(place.file, number, start, min(start + block_bytes, file.size))


class _Reading:
    """Which blocks this rank reads in which group, and the plan of where their elements go."""

    def __init__(
        self,
        files: Sequence[PlannedFile],
        shares: Sequence[Sequence[Block]],
        want: Sequence[Sequence[Piece]],
        layout: Layout,
    ) -> None:
        parts = [
            [
                (index, part)
                for index, block in enumerate(share)
                for part in parts_of(files[block.file], block)
            ]
            for share in shares
        ]
        have = [[Piece(p.key, p.shape, p.box, p.dtype) for _, p in theirs] for theirs in parts]
        self.groups = -(-max(map(len, shares)) // GROUP_BLOCKS)
        self.relay = Relay(
            plan(have, want),
            lambda move: parts[move.source][move.have][0] // GROUP_BLOCKS,
            layout,
            torch.device("cpu"),
        )
        self._parts: list[tuple[int, Part]] = parts[layout.rank]
        self._share = shares[layout.rank]
        self._slot_bytes = max((block.stop - block.start for block in self._share), default=0)
        self._slot_bytes = -(-self._slot_bytes // 8) * 8
        slots = min(len(self._share), GROUP_BLOCKS)
        self._buffer = torch.empty(slots * self._slot_bytes, dtype=torch.uint8)

    def blocks(self, group: int) -> Iterator[tuple[memoryview, Block]]:
        """The blocks to read for a group, each with the memory it goes into."""
        memory = memoryview(self._buffer.numpy().data).cast("B")
        first = group * GROUP_BLOCKS
        for slot, block in enumerate(self._share[first : first + GROUP_BLOCKS]):
            start = slot * self._slot_bytes
            yield memory[start : start + block.stop - block.start], block

    def read(self, move: Move) -> Tensor:
        """A move's elements, in the buffer."""
        index, part = self._parts[move.have]
        start = index % GROUP_BLOCKS * self._slot_bytes + part.start
        raw = self._buffer[start : start + part.box.elements * part.dtype.itemsize]
        there = raw.view(part.dtype).view(part.box.sizes)
        return there[move.box.relative_to(part.box).slices]


def _copy(mine: Tensor, elements: Tensor) -> None:
    mine.copy_(elements)


def _span(piece: Piece) -> tuple[int, int]:
    """First element and one past the last, in C order over the whole tensor."""
    first = last = 0
    for offset, size, extent in zip(piece.box.offsets, piece.box.sizes, piece.shape, strict=True):
        first = first * extent + offset
        last = last * extent + offset + size - 1
    return first, last + 1
