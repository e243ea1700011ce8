"""Write one step and commit it.

Each rank assembles a few spans of blocks at a time from its tensors and other ranks' messages. One thread hashes and writes,
others sync. All files go into a directory without a step's name. The commit renames it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.boxes.box import whole
from burnish.boxes.pieces import PieceTable
from burnish.boxes.plan import Group, Move
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.tensor_reader import OpenFiles, bytes_of, copy
from burnish.boxes.transfer import Exchange, accelerator_of, meeting_place
from burnish.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    MAX_FILES,
    STATE,
    STATE_LIMIT,
    Commit,
    FileRecord,
    Manifest,
    block_hashes,
    record_of,
    sha256,
)
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import INFLIGHT, TRASH, open_step, step_name
from burnish.checkpoint.write_plan import (
    MODEL,
    RESIDUAL,
    Outline,
    Span,
    WritePlan,
    prefix_of,
    residual,
    rounded,
)
from burnish.distributed.collectives import agree, gather_objects, same_on_all_ranks
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, bytes_text, few
from burnish.files.durable import Removals, Syncs, discard, naming_failures
from burnish.files.lease import LeaseToken
from burnish.files.storage import LocalFile, LocalStorage
from burnish.files.strict_json import encode_json
from burnish.version import __version__

Fence = Callable[[], None]
"""Raises an error if a step may not be committed any more."""
BlockHashes = list[tuple[int, int, list[str]]]
"""Index of a file, index of a block in it, and the hashes of blocks from there on."""

# A file is synced each time this many bytes are written, and at its end.
_SYNC_BYTES = 16 << 20
# Smaller pieces of tensors are copied into a span, because a system call for each would cost more.
_DIRECT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class ModelContents:
    """One trained model."""

    weights: Sequence[Shard]
    """This rank's pieces of the model, by canonical name."""
    training: Sequence[Shard]
    """This rank's pieces of the optimizer's slots, named `slot/weight`."""
    assets: Mapping[str, bytes] = field(default_factory=dict)
    """Rank 0: config.json and tokenizer files, by path below the model's directory."""
    whole: frozenset[str] = frozenset()
    """Names of fp32 weights that are never split: their family keeps them in fp32."""
    untrained: Callable[[], Mapping[str, Tensor]] | None = None
    """Rank 0: returns whole tensors that are not trained, by name; they are saved as they are (`burnish.checkpoint.kept`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The contents of a step."""

    models: Mapping[str, ModelContents]
    """By role; `MAIN` is the run's own. The same roles on every rank."""
    state: Mapping[str, Any]
    """The position of the run, as plain JSON."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Rank 0: further files, by path below the step."""
    healthy: bool = True
    """False when losses or weights are not finite; one rank's False counts for all."""
    check_finite: bool = False
    """Whether a weight that is not finite makes the step unhealthy."""
    split: bool = True
    """Store fp32 weights as a bf16 model and a residual. False: as an fp32 model."""
    arena: Arena | None = None
    """Host memory to assemble blocks in; None: memory that is freed after the save."""

    @property
    def shards(self) -> list[Shard]:
        """Return all models' weights and slots."""
        return [s for model in self.models.values() for s in (*model.weights, *model.training)]

    def with_shards(self, change: Callable[[Shard], Shard]) -> Contents:
        """Return a copy with changed shards."""
        models = {
            role: replace(
                model,
                weights=[change(shard) for shard in model.weights],
                training=[change(shard) for shard in model.training],
            )
            for role, model in self.models.items()
        }
        return replace(self, models=models)


class StoredShard(NamedTuple):
    """A shard, and how it is stored."""

    shard: Shard
    spec: TensorSpec
    """The stored tensor; its name is its key."""
    convert: Callable[[Tensor, Tensor], None] = copy
    """Writes elements (first) as they are stored (second)."""
    checked: bool = False
    """Whether to look for elements that are not finite."""


class BlockWriter:
    """Write this rank's blocks of a plan, once. Ranks exchange messages on `device`."""

    def __init__(
        self,
        plan: WritePlan,
        shards: Sequence[StoredShard],
        layout: Layout,
        device: torch.device,
        arena: Arena,
    ) -> None:
        self.plan = plan
        self._shards = shards
        self._layout = layout
        size = max(
            (sum(aligned(s.stop - s.start) for s in spans) for spans in plan.share.spans), default=0
        )
        # Two memories take turns: one is filled while the other is hashed and written.
        self._memory = [arena.take(size) for _ in range(2)]
        self._exchange = Exchange(layout, device, arena)
        self._last = {span.file: span for spans in plan.share.spans for span in spans}
        self._unsynced = dict.fromkeys(self._last, 0)
        self._is_finite = True

    def write(
        self, files: OpenFiles[LocalFile], syncs: Syncs, what: str
    ) -> list[tuple[BlockHashes, bool]]:
        """Write all blocks and begin their syncs; return every rank's hashes, and whether its checked elements are finite.

        Collective, errors included.
        """
        begun: list[Future[BlockHashes]] = []
        with ThreadPoolExecutor(1, "burnish-write") as writing:
            for number, moves in enumerate(self.plan.share.moves):
                wait(begun[: max(0, number - 1)])  # errors are raised below, on all ranks
                spans = self._filled(self.plan.share.spans[number], moves, self._memory[number % 2])
                begun.append(writing.submit(self._write_spans, spans, files, syncs))
            with agree(self._layout), naming_failures(what):
                hashes = [run for written in begun for run in written.result()]
        return gather_objects((hashes, self._is_finite), self._layout)

    def _write_spans(
        self,
        spans: list[tuple[Span, list[memoryview]]],
        files: OpenFiles[LocalFile],
        syncs: Syncs,
    ) -> BlockHashes:
        hashes: BlockHashes = []
        for span, pieces in spans:
            file = files[self.plan.outline.files[span.file].path]
            block_bytes = self.plan.outline.block_bytes
            first_block = span.start // block_bytes
            hashes.append((span.file, first_block, list(block_hashes(pieces, block_bytes))))
            offset = span.start
            for piece in pieces:
                file.pwrite(piece, offset)
                offset += len(piece)
            self._unsynced[span.file] += offset - span.start
            if self._unsynced[span.file] >= _SYNC_BYTES or span is self._last[span.file]:
                self._unsynced[span.file] = 0
                syncs.begin(file.sync)
        return hashes

    def _filled(
        self, share: Sequence[Span], moves: Group, memory: Tensor
    ) -> list[tuple[Span, list[memoryview]]]:
        """Return each span's pieces: views of large tensors, else of `memory`."""
        spans = list[Tensor]()
        start = 0
        for span in share:
            spans.append(memory[start : start + span.stop - span.start])
            start += aligned(span.stop - span.start)
            file = self.plan.outline.files[span.file]
            if span.start < file.header_bytes:
                header = file.header_within(span.start, span.stop)
                spans[-1][: len(header)].numpy()[:] = np.frombuffer(header, np.uint8)
        checked: list[Tensor] = []
        direct: list[dict[int, Tensor]] = [{} for _ in share]

        def elements_of(move: Move) -> Tensor:
            stored = self._shards[move.have]
            elements = stored.shard.part(move.box)
            if stored.checked:
                checked.append(elements)
            return elements

        def read(move: Move, into: Tensor) -> None:
            self._shards[move.have].convert(elements_of(move), into)

        def into(move: Move) -> Tensor:
            place = self.plan.share.places[move.want]
            stop = place.start + place.box.elements * move.dtype.itemsize
            part = spans[place.slot][place.start : stop].view(move.dtype).view(place.box.sizes)
            return part if move.box == place.box else part[move.box.relative_to(place.box).slices]

        with torch.no_grad():
            for move in moves.own:
                elements = elements_of(move)
                target = into(move)
                if self._shards[move.have].convert is copy and _is_direct(elements, target):
                    slot = self.plan.share.places[move.want].slot
                    direct[slot][target.data_ptr() - spans[slot].data_ptr()] = elements
                else:
                    self._shards[move.have].convert(elements, target)
            for wave in moves.waves:
                self._exchange.run(wave, read, lambda move, got: copy(got, into(move)))
            self._is_finite &= _are_finite(checked)
        return [
            (span, list(_pieces(assembled, parts)))
            for span, assembled, parts in zip(share, spans, direct, strict=True)
        ]


def _is_direct(elements: Tensor, target: Tensor) -> bool:
    """Return whether elements lie in memory as in the file, and are worth a system call."""
    return (
        elements.is_cpu
        and elements.dtype == target.dtype
        and elements.nbytes >= _DIRECT_BYTES
        and elements.is_contiguous()
        and target.is_contiguous()
    )


def _pieces(memory: Tensor, parts: Mapping[int, Tensor]) -> Iterator[memoryview]:
    offset = 0
    for start, part in sorted(parts.items()):
        if offset < start:
            yield bytes_of(memory[offset:start])
        yield bytes_of(part)
        offset = start + part.nbytes
    if offset < len(memory):
        yield bytes_of(memory[offset:])


def aligned(size: int) -> int:
    """Round up to 64."""
    return -(-size // 64) * 64


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A committed step."""

    path: Path
    """Its directory."""
    warning: BurnishError | None
    """Rank 0: failures to remove other steps; None without any."""


@dataclass(slots=True, eq=False)
class Saver:
    """Save the steps of one run; reuse the plan."""

    root: Path
    """The run's `checkpoints/`."""
    layout: Layout
    """This process among those that save together."""
    storage: LocalStorage
    retention: Retention | None = None
    """Which steps stay; None: all."""
    reserve_bytes: int = 0
    """Bytes of the disk that stay free."""
    token: LeaseToken | None = None
    """Rank 0: its right to commit below `root`."""
    _pieces: str = field(default="", init=False)
    _plan: WritePlan | None = field(default=None, init=False)

    def save(self, step: int, contents: Contents, fence: Fence = lambda: None) -> SaveResult:
        """Commit a step and remove those that retention drops. Collective, errors included.

        Rank 0 calls `fence` before the rename; its error prevents it. Raises `BurnishError` if the step exists or writing fails.
        """
        layout = self.layout
        with agree(layout):
            shards = list(_stored(contents))
            pieces = PieceTable.of((stored.spec, stored.shard.box) for stored in shards)
        device = accelerator_of(contents.shards)
        own = (step, uuid.uuid4().hex, contents.healthy, device, self.digest(pieces))
        steps, uuids, are_healthy, devices, plans = zip(*gather_objects(own, layout), strict=True)
        if len({*steps}) > 1:
            raise BurnishError(
                "ranks are saving different steps",
                have=", ".join(map(str, sorted({*steps}))),
                want="one step",
                do="start all ranks again, with one configuration, from one checkpoint",
            )
        plan = self.plan(pieces, contents.models, plans)
        exchange_device = meeting_place(devices, device)
        arena = contents.arena or Arena(torch.device("cpu"))
        writer = partial(BlockWriter, plan, shards, layout, exchange_device, arena)
        empty = Manifest(uuids[0], step, layout.world, {})
        contents = replace(contents, healthy=all(are_healthy))
        try:
            path = self._write(writer, contents, empty, fence)
        except BaseException:
            if layout.is_main:
                with suppress(OSError):
                    self._discard(f"{step:08d}.{empty.uuid}")
            raise
        with agree(layout):
            return SaveResult(path, self.let_go() if layout.is_main else None)

    def digest(self, pieces: PieceTable) -> str:
        """Return the digest of the plan for these pieces; "" without one."""
        return self._plan.share.digest if self._plan and pieces.digest() == self._pieces else ""

    def plan(self, pieces: PieceTable, roles: Iterable[str], known: Sequence[str]) -> WritePlan:
        """Return the plan; the last one, if it is `known` to all ranks. Collective. Raises as `WritePlan.of` does."""
        if self._plan is None or set(known) != {self._plan.share.digest}:
            plan = WritePlan.together(pieces, roles, self.layout)
            same_on_all_ranks(plan.share.digest, "the plan of the save", self.layout)
            self._pieces = pieces.digest()
            self._plan = plan
        return self._plan

    def _write(
        self, begin: Callable[[], BlockWriter], contents: Contents, empty: Manifest, fence: Fence
    ) -> Path:
        layout = self.layout
        what = f"step {empty.step} could not be saved"
        inflight = self.root / f"{INFLIGHT}{empty.step:08d}.{empty.uuid}"
        final = self.root / step_name(empty.step)
        small: dict[str, bytes] = {}
        with (
            OpenFiles(lambda path: self.storage.open(inflight / path, write=True)) as files,
            Syncs() as syncs,
        ):
            with agree(layout), naming_failures(what):
                writer = begin()
                outline = writer.plan.outline
                if layout.is_main:
                    small |= {**outline.indices, **_small_files(contents)}
                    # Refuse a step whose manifest could not be read again before anything is written.
                    no_hashes = [()] * len(outline.files)
                    _check_manifest(replace(empty, files=_records(outline, no_hashes, small)))
                    below = self._lay_out(inflight, empty.step, outline, small)
            # Syncs wait for the disk, so small files are written and synced while the blocks are written.
            for path, data in small.items():
                syncs.begin(partial(_fill, files, path, data))
            hashes, are_finite = zip(*writer.write(files, syncs, what), strict=True)
            with agree(layout), naming_failures(what):
                if layout.is_main:
                    records = _records(outline, _all_hashes(outline, hashes), small)
                    healthy = contents.healthy and all(are_finite)
                    sealed = _sealed(replace(empty, files=records), healthy=healthy)
                    # Manifest and COMMIT have the hashes, so they are written when all blocks have been hashed. The disk may
                    # still be syncing blocks then; nobody looks for a COMMIT below this name.
                    seals = {inflight / path: data for path, data in sealed.items()}
                    syncs.write_new(self.storage, seals, [inflight, *below])
                syncs.finish()
        # Every rank has synced its files when it gets here, or none goes on. Then one rename makes the step visible: a reader sees
        # all of it or nothing, whatever dies at whatever moment.
        with agree(layout), naming_failures(what):
            if layout.is_main:
                self._commit(inflight, final, fence)
        return final

    def _lay_out(
        self, inflight: Path, step: int, outline: Outline, small: Mapping[str, bytes]
    ) -> list[Path]:
        """Create the files, and return the directories below `inflight`."""
        check_new(self.root, step, self.storage)
        sizes = {path: len(data) for path, data in small.items()}
        sizes |= {file.path: file.size for file in outline.files}
        self._require_room(step, sum(sizes.values()))
        parents = {parent for path in sizes for parent in (inflight / path).parents}
        below = sorted(parent for parent in parents if inflight in parent.parents)
        for path in (inflight, *below):
            self.storage.make_dirs(path)
        for name, size in sizes.items():
            with self.storage.create(inflight / name, size):
                pass
        return below

    def _commit(self, inflight: Path, final: Path, fence: Fence) -> None:
        # Last looks before the step appears: another start may own the directory by now, or the training process of
        # this writer may be gone.
        if self.token is not None:
            self.token.check()
        fence()
        self.storage.rename(inflight, final)
        self.storage.sync_dir(final.parent)

    def _require_room(self, step: int, needed: int) -> None:
        """Raise `BurnishError` unless `needed` + `reserve_bytes` are free."""
        self.storage.make_dirs(self.root)
        free = self.storage.free_bytes(self.root)
        if free >= needed + self.reserve_bytes:
            return
        have = f"{bytes_text(free)} free where {self.root} lies"
        do = "free some space, or set checkpoint.keep_last or checkpoint.reserve_gb lower"
        if self.retention and (steps := self.retention.waiting(self.root, self.storage)):
            mirror = self.retention.mirror
            have += f"; not on {mirror} yet, and kept for it: {few([str(step) for step in steps])}"
            do = f"see that {mirror} can be reached, so that these steps can go; or free some space"
        raise BurnishError(
            f"the disk has no room for step {step}",
            have=have,
            want=f"{bytes_text(needed)} for the step and {bytes_text(self.reserve_bytes)} in reserve",
            do=do,
        )

    def holds(self, step: int) -> bool:
        """Return whether the step is committed."""
        with suppress(CorruptError):
            open_step(self.root / step_name(step), self.storage)
            return True
        return False

    def discard(self, step: int) -> BurnishError | None:
        """Remove a failed save; return the failures. For rank 0."""
        removals = Removals(self.root)
        with removals.trying():
            self._discard(f"{step:08d}.")
        return removals.error()

    def _discard(self, name: str) -> None:
        for entry in self.storage.entries(self.root):
            if entry.name.startswith(f"{INFLIGHT}{name}"):
                discard(self.storage, self.root / entry.name, self.root / TRASH)

    def let_go(self) -> BurnishError | None:
        """Remove steps that retention drops; return the failures. For rank 0."""
        return self.retention.apply(self.root, self.storage) if self.retention else None


def _stored(contents: Contents) -> Iterator[StoredShard]:
    reserved_names = {MODEL, RESIDUAL, *contents.models}
    for role, model in contents.models.items():
        prefix = prefix_of(role)
        for shard in model.weights:
            name, shape, _ = shard.spec
            dtype = shard.tensor.dtype
            key = f"{prefix}{MODEL}/{name}"
            if contents.split and dtype == torch.float32 and name not in model.whole:
                spec = TensorSpec(key, shape, torch.bfloat16)
                yield StoredShard(shard, spec, rounded, contents.check_finite)
                rest = TensorSpec(f"{prefix}{RESIDUAL}/{name}", shape, torch.int16)
                yield StoredShard(shard, rest, residual)
            else:
                spec = TensorSpec(key, shape, dtype)
                yield StoredShard(shard, spec, checked=contents.check_finite)
        for name, tensor in (model.untrained() if model.untrained else {}).items():
            spec = TensorSpec(f"{prefix}{MODEL}/{name}", tuple(tensor.shape), tensor.dtype)
            yield StoredShard(Shard(spec, whole(spec.shape), tensor), spec)
        for shard in model.training:
            slot, _, name = shard.spec.name.partition("/")
            if not name or slot in reserved_names or not slot.isidentifier():
                raise ValueError(f"{shard.spec.name!r} is not the name of a slot and a weight")
            key = f"{prefix}{slot}/{name}"
            yield StoredShard(shard, TensorSpec(key, shard.spec.shape, shard.tensor.dtype))


def _small_files(contents: Contents) -> dict[str, bytes]:
    state = encode_json(dict(contents.state))
    if len(state) > STATE_LIMIT:
        raise BurnishError(
            f"the run's state is too large for {STATE}",
            have=f"{len(state)} bytes",
            want=f"{STATE_LIMIT} bytes at most",
            do="keep data that grows with the run out of the state",
        )
    small = {STATE: state, **contents.files}
    for role, model in contents.models.items():
        for name, data in model.assets.items():
            small[f"{prefix_of(role)}{MODEL}/{name}"] = data
    return small


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements are finite: surely if their sum is, which takes less time than a look at each."""
    floats = [x for x in tensors if x.is_floating_point() and x.dtype.itemsize > 1]
    sums = torch.stack([x.sum(dtype=torch.float32) for x in floats] or [torch.zeros(())])
    return bool(sums.isfinite().all()) or all(bool(x.isfinite().all()) for x in floats)


def check_new(root: Path, step: int, storage: LocalStorage) -> None:
    """Raise `BurnishError` if the step exists."""
    if storage.kind(root / step_name(step)) is not None:
        raise BurnishError(
            f"step {step} exists already",
            have=root / step_name(step),
            want="a step that does not exist yet: none is ever overwritten",
            do="move it away, or continue from it",
        )


def _all_hashes(outline: Outline, hashes: Iterable[BlockHashes]) -> list[list[str]]:
    """Return the hashes of every file. Raises `BurnishError` unless every block has exactly one."""
    by_file = [[""] * outline.blocks_in(file) for file in outline.files]
    planned = sum(map(len, by_file))
    written = 0
    for file, first, digests in chain.from_iterable(hashes):
        by_file[file][first : first + len(digests)] = digests
        written += len(digests)
    missing = sum(file_hashes.count("") for file_hashes in by_file)
    if written != planned or missing:
        raise BurnishError(
            "ranks wrote other blocks than were planned",
            have=f"{written} blocks written, {missing} by no rank",
            want=f"{planned} blocks, each by one rank",
            do="see that all ranks run the same version; if they do, this is a bug in Burnish",
        )
    return by_file


def _records(
    outline: Outline, hashes: Sequence[Sequence[str]], small: Mapping[str, bytes]
) -> dict[str, FileRecord]:
    """`hashes`: by file."""
    records = {path: record_of(data) for path, data in small.items()}
    for file, blocks in zip(outline.files, hashes, strict=True):
        records[file.path] = FileRecord(file.size, outline.block_bytes, tuple(blocks))
    return records


def _check_manifest(manifest: Manifest) -> None:
    size = manifest.encoded_bytes()
    files = len(manifest.files)
    if size > MANIFEST_LIMIT or files > MAX_FILES:
        raise BurnishError(
            f"step {manifest.step} is too large for one manifest, which could not be read again",
            have=f"{manifest.total_bytes / 1e12:.1f} TB in {files} files: {size} bytes of {MANIFEST}",
            want=f"{MANIFEST_LIMIT} bytes for {MAX_FILES} files at most",
            do="train an adapter with model.lora.rank",
        )


def _sealed(manifest: Manifest, *, healthy: bool) -> dict[str, bytes]:
    encoded = manifest.encode()
    commit = Commit(
        version=__version__,
        uuid=manifest.uuid,
        step=manifest.step,
        manifest_sha256=sha256(encoded),
        total_bytes=manifest.total_bytes,
        healthy=healthy,
    )
    return {MANIFEST: encoded, COMMIT: commit.encode()}


def _fill(files: OpenFiles[LocalFile], path: str, data: bytes) -> None:
    files[path].pwrite(data, 0)
    files[path].sync()
