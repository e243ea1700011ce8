"""Write the blocks of a step's tensor files from the ranks' memory to the disk.

Each rank writes the blocks of which it holds most; ties are broken so that all write equally much. Blocks that follow each other
are written as one span. A few spans at a time are put together from local tensors and other ranks' messages, while one thread
hashes and writes and another syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from burnish.boxes.pieces import Described, PieceTable, TensorIndex, gather_pieces
from burnish.boxes.plan import Cover, Move
from burnish.boxes.rounds import Group, schedule
from burnish.boxes.shards import Piece, Shard
from burnish.boxes.tensor_reader import dtype_name
from burnish.boxes.transfer import Exchange
from burnish.checkpoint.disks import Disks
from burnish.checkpoint.layout import (
    PartPlace,
    Parts,
    PlannedFile,
    Span,
    SpanTable,
    Stored,
    block_bytes_for,
    groups_of,
    owners_by_disk,
    plan_files,
)
from burnish.checkpoint.naming import key_parts
from burnish.distributed.collectives import agree, same_on_all_ranks
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures
from burnish.files.storage import Closing, LocalFile, LocalStorage

BlockHashes = dict[tuple[int, int], str]
"""By index of the file and index of the block in it."""

_SPAN_BYTES, _GROUP_BYTES = 4 << 20, 16 << 20
# Most bytes of a span, and of the spans put together at one time; as many are being written meanwhile. One block at least.
_WAVE_BYTES = 16 << 20
_SYNC_BYTES = 32 << 20
# The disk is asked to begin whenever so much has been written.
_DIRECT_BYTES = 64 << 10
# Smaller pieces are copied into the buffer: a system call costs more.


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """A step's files, which blocks this rank writes, and where their elements come from."""

    files: Sequence[PlannedFile]
    """All of the step's tensor files."""
    indices: Mapping[str, bytes]
    """The index files that belong to them, by path."""
    block_bytes: int
    """The size of their blocks."""
    disks: Sequence[int]
    """The disk that each file goes to."""
    share: Sequence[Sequence[Span]]
    """The spans that this rank writes, by group: put together at one time."""
    places: dict[int, PartPlace]
    """Where in its group's spans a move's elements go, by `Move.want`."""
    moves: Sequence[Group]
    """The moves for each group of all ranks."""
    digest: str
    """The same on all ranks."""

    @classmethod
    def of(
        cls, have: Sequence[PieceTable], roles: Iterable[str], layout: Layout, disks: Disks
    ) -> WritePlan:
        """Plan for all ranks' pieces, named by their storage keys, and the ranks' disks.

        Raises `MissingError` for an incomplete tensor, and `BurnishError` if ranks disagree about one.
        """
        files, indices = plan_files(_stored(have, roles))
        tensors = TensorIndex()
        [held] = tensors.merge(have)
        block_bytes = block_bytes_for(files)
        disk_of_file = disks.divide([file.size for file in files])
        blocks = SpanTable.blocks([file.size for file in files], block_bytes)
        parts = Parts.of(files, blocks, tensors)
        cover = Cover.of(held, parts.pieces, tensors)
        part, holder = cover.holders()
        size = cover.boxes.elements * tensors.itemsizes()[parts.pieces.dtype[cover.want]]
        owner = owners_by_disk(
            parts.span[cover.want[part]],
            cover.held.rank[holder],
            size[part],
            np.array(disk_of_file, np.int64)[blocks.file],
            np.array(disks.of_rank),
        )
        spans, owner = blocks.joined(owner, _SPAN_BYTES)
        parts = Parts.of(files, spans, tensors)
        moves = Cover.of(held, parts.pieces, tensors).moves(owner[parts.span])
        travels = np.zeros(len(owner), bool)
        travels[parts.span[moves.want[moves.source != moves.target]]] = True
        most = max(_SPAN_BYTES, block_bytes)
        group, index = groups_of(
            owner, spans.stop - spans.start, travels, max(most, _GROUP_BYTES - most)
        )
        groups = int(group.max(initial=-1)) + 1
        mine = owner == layout.rank
        share: list[list[Span]] = [[] for _ in range(groups)]
        for number in np.flatnonzero(mine)[np.argsort(index[mine], kind="stable")].tolist():
            share[group[number]].append(spans[number])
        return cls(
            files,
            indices,
            block_bytes,
            disk_of_file,
            share,
            parts.places(np.where(mine, index, -1)),
            schedule(moves, layout.rank, _WAVE_BYTES, group[parts.span[moves.want]], groups),
            moves.digest(),
        )

    def files_on(self, disk: int) -> list[PlannedFile]:
        """The files that go to a disk."""
        return [file for file, of in zip(self.files, self.disks, strict=True) if of == disk]

    def blocks_in(self, file: PlannedFile) -> int:
        """The number of blocks of a file."""
        return -(-file.size // self.block_bytes)


def _stored(have: Iterable[PieceTable], roles: Iterable[str]) -> list[Stored]:
    """Every tensor that any rank has a piece of, once."""
    found: dict[str, Stored] = {}
    seen: set[tuple[Described, ...]] = set()
    for table in have:
        for key, shape, dtype in () if table.tensors in seen else table.tensors:
            tensor_set, name = key_parts(key, roles)
            stored = Stored(tensor_set, name, dtype_name(dtype, name), shape)
            if found.setdefault(key, stored) != stored:
                raise BurnishError(
                    f"ranks disagree about tensor {key}",
                    have=f"{found[key].dtype} {list(found[key].shape)}",
                    want=f"{stored.dtype} {list(shape)}",
                    do="start all ranks with one configuration and one model",
                )
        seen.add(table.tensors)
    return list(found.values())


class SavePlanner:
    """Plans the saves of a layout's ranks, to one disk unless others are named. It keeps the last plan."""

    def __init__(self, layout: Layout, disks: Disks | None = None) -> None:
        self.layout = layout
        """This process among those that save together."""
        self.disks = disks or Disks.one(layout.world)
        """Where they write to."""
        self._pieces = ""
        self._plan: WritePlan | None = None

    def digest(self, pieces: PieceTable) -> str:
        """Of the plan that was made for such pieces of this rank; "" for none."""
        if self._plan is None or pieces.digest() != self._pieces:
            return ""
        return self._plan.digest

    def plan(self, pieces: PieceTable, roles: Iterable[str], known: Sequence[str]) -> WritePlan:
        """Return the plan for every rank's pieces, by storage key. Collective.

        If `known` has the same `digest` for all ranks, that plan is taken. Raises as `WritePlan.of` does.
        """
        if self._plan is None or set(known) != {self._plan.digest}:
            have = gather_pieces(pieces, self.layout)
            plan = WritePlan.of(have, roles, self.layout, self.disks)
            same_on_all_ranks(plan.digest, "the plan of the save", self.layout)
            self._pieces, self._plan = pieces.digest(), plan
        return self._plan


@dataclass(frozen=True, slots=True, eq=False)
class StoredShard:
    """A shard as it will be stored."""

    shard: Shard
    """Where its elements are."""
    key: str
    """Names the stored tensor among all of the step."""
    dtype: torch.dtype
    """Its dtype on disk."""
    convert: Callable[[Tensor, Tensor], None] | None = None
    """Writes elements (first) as they are stored (second); None when they are stored as they are."""

    @property
    def piece(self) -> Piece:
        """What the planner sees of it."""
        return Piece(self.key, self.shard.spec.shape, self.shard.box, self.dtype)


class BlockWriter:
    """Writes this rank's blocks of a plan's files, from the shards that it was planned for.

    Blocks are put together in `arena`; messages between ranks meet on `device`.
    """

    def __init__(
        self,
        plan: WritePlan,
        shards: Sequence[StoredShard],
        layout: Layout,
        device: torch.device,
        arena: Arena,
    ) -> None:
        self.plan = plan
        """What is written."""
        self._shards = shards
        self._layout = layout
        self._arena = arena
        self._exchange = Exchange(layout, device, arena)

    def write(self, directory: Path, storage: LocalStorage, what: str) -> BlockHashes:
        """Write and sync all blocks, and return the hashes of this rank's. Collective, errors included.

        The files are in `directory` at their final size. `what` starts the message if the disk fails.
        """
        plan = self.plan
        size = max((sum(map(_room, share)) for share in plan.share), default=0)
        begun: list[Future[BlockHashes]] = []
        hashes: BlockHashes = {}
        with ExitStack() as opened:
            files: dict[int, LocalFile] = {}
            with agree(self._layout), naming_failures(what):
                memory = [self._arena.take(size) for _ in range(2)]
                for index in sorted({span.file for share in plan.share for span in share}):
                    path = directory / plan.files[index].path
                    files[index] = opened.enter_context(storage.open(path, write=True))
            disk = opened.enter_context(_Disk(files, plan.block_bytes))
            for number, moves in enumerate(plan.moves):
                wait(begun[: max(0, number - 1)])  # errors are raised below, on all ranks
                spans = self._filled(plan.share[number], moves, memory[number % 2])
                begun.append(disk.write(spans))
            with agree(self._layout), naming_failures(what):
                for written in begun:
                    hashes |= written.result()
                disk.sync()
        return hashes

    def _filled(
        self, share: Sequence[Span], moves: Group, memory: Tensor
    ) -> list[tuple[Span, SpanMemory]]:
        """Put a few spans together. Collective."""
        places, spans, start = self.plan.places, list[SpanMemory](), 0
        for span in share:
            spans.append(SpanMemory(memory[start : start + span.stop - span.start]))
            start += _room(span)
            header = self.plan.files[span.file].header[span.start : span.stop]
            there = spans[-1].part(0, (len(header),), torch.uint8)
            there.numpy()[:] = np.frombuffer(header, np.uint8)

        def into(move: Move) -> Tensor:
            place = places[move.want]
            part = spans[place.slot].part(place.start, place.box.sizes, move.dtype)
            return part[move.box.relative_to(place.box).slices]

        with torch.no_grad():
            for move in moves.own:
                place, stored = places[move.want], self._shards[move.have]
                elements = stored.shard.part(move.box)
                if stored.convert is None and move.box == place.box and _is_plain(elements):
                    spans[place.slot].put(place.start, elements)
                else:
                    (stored.convert or _copy)(elements, into(move))
            for wave in moves.waves:
                self._exchange.run(wave, self._read, lambda move, got: into(move).copy_(got))
        return list(zip(share, spans, strict=True))

    def _read(self, move: Move, into: Tensor) -> None:
        stored = self._shards[move.have]
        (stored.convert or _copy)(stored.shard.part(move.box), into)


def _copy(elements: Tensor, into: Tensor) -> None:
    into.copy_(elements)


class _Disk(Closing):
    """Two threads: one hashes and writes spans in order, one syncs what was written."""

    def __init__(self, files: dict[int, LocalFile], block_bytes: int) -> None:
        self._files, self._block_bytes = files, block_bytes
        self._writing = ThreadPoolExecutor(1, "burnish-write")
        self._syncing = ThreadPoolExecutor(1, "burnish-sync")
        self._unsynced = dict.fromkeys(files, 0)
        self._syncs: list[Future[None]] = []

    def write(self, spans: list[tuple[Span, SpanMemory]]) -> Future[BlockHashes]:
        """Begin to write spans; return the hashes of their blocks, in time."""
        return self._writing.submit(self._write, spans)

    def sync(self) -> None:
        """Return when all that was written survives a power loss. Nothing may be being written."""
        for begun in self._syncs:
            begun.result()
        for index, file in self._files.items():
            if self._unsynced[index]:
                file.sync()

    def _write(self, spans: list[tuple[Span, SpanMemory]]) -> BlockHashes:
        hashes: BlockHashes = {}
        for span, memory in spans:
            file, at = self._files[span.file], span.start
            for number, digest in enumerate(hashes_of(memory.pieces(), self._block_bytes)):
                hashes[span.file, span.start // self._block_bytes + number] = digest
            for data in memory.pieces():
                file.pwrite(data, at)
                at += len(data)
            self._unsynced[span.file] += at - span.start
            if self._unsynced[span.file] >= _SYNC_BYTES:
                self._unsynced[span.file] = 0
                self._syncs.append(self._syncing.submit(file.sync))
        return hashes

    def close(self) -> None:
        """Wait for what has begun; drop the rest."""
        self._writing.shutdown(cancel_futures=True)
        self._syncing.shutdown(cancel_futures=True)


class SpanMemory:
    """A span in memory: part of a buffer, in which tensors elsewhere may stand for their bytes."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._direct: list[tuple[int, Tensor]] = []

    def part(self, start: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer's bytes from `start` on as a tensor."""
        count = torch.Size(sizes).numel() * dtype.itemsize
        return self._buffer[start : start + count].view(dtype).view(sizes)

    def put(self, start: int, tensor: Tensor) -> None:
        """Have the elements of a contiguous tensor at `start`, where they lie."""
        self._direct.append((start, tensor))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes from the first to the last."""
        at = 0
        for start, tensor in sorted(self._direct, key=lambda each: each[0]):
            if start > at:
                yield _as_bytes(self._buffer[at:start])
            yield _as_bytes(tensor)
            at = start + tensor.nbytes
        if at < self._buffer.numel():
            yield _as_bytes(self._buffer[at:])


def _room(span: Span) -> int:
    """Return the bytes of memory of a span, a multiple of 64."""
    return -(-(span.stop - span.start) // 64) * 64


def hashes_of(pieces: Iterable[memoryview], block_bytes: int) -> Iterator[str]:
    """Yield the hash of each block of the bytes that follow each other in `pieces`."""
    digest, left = xxhash.xxh3_128(), block_bytes
    for piece in pieces:
        data = piece
        while data:
            digest.update(some := data[:left])
            data, left = data[len(some) :], left - len(some)
            if not left:
                yield digest.hexdigest()
                digest, left = xxhash.xxh3_128(), block_bytes
    if left < block_bytes:
        yield digest.hexdigest()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether elements lie in host memory as in a file, and are worth a system call."""
    on_cpu = tensor.device.type == "cpu"
    return on_cpu and tensor.is_contiguous() and tensor.nbytes >= _DIRECT_BYTES


def _as_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
