"""Write one step: its contents, and the moment at which it exists.

Everything goes into a directory without a step's name. Manifest and COMMIT come last, then one rename. With several disks each
gets the same with its own files: a partial checkpoint, no step.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish import __version__
from burnish.boxes.pieces import PieceTable
from burnish.boxes.plan import Move
from burnish.boxes.shards import Piece, Shard
from burnish.boxes.transfer import accelerator_of, meeting_place
from burnish.checkpoint.destinations.disks import Disks
from burnish.checkpoint.destinations.partial_checkpoints import SEAL, portion_paths
from burnish.checkpoint.layout import PlannedFile, residual, rounded
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
    record_of,
    sha256,
)
from burnish.checkpoint.naming import MODEL, RESIDUAL, prefix_of
from burnish.checkpoint.retention import Retention, require_room
from burnish.checkpoint.steps import INFLIGHT, PORTION, TRASH, open_step, step_name
from burnish.checkpoint.writer import BlockHashes, BlockWriter, SavePlanner, WritePlan
from burnish.distributed.collectives import agree, from_main, gather_objects
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError
from burnish.files.durable import (
    NotRemovedError,
    Removals,
    discard,
    naming_failures,
    sync_dirs,
    write_new,
)
from burnish.files.lease import Token
from burnish.files.storage import Storage
from burnish.files.strict_json import encode_json


@dataclass(frozen=True, slots=True, eq=False)
class ModelContents:
    """One trained model. Every rank gives its own shards; of the rest, rank 0's counts."""

    weights: Sequence[Shard]
    """This rank's pieces of the model, by canonical name."""
    training: Sequence[Shard]
    """This rank's pieces of the optimizer's slots, named `slot/weight`."""
    write_assets: Callable[[Path], None]
    """Writes what makes its directory a Hugging Face model's (config.json, tokenizer files) into the directory it is given."""
    whole: frozenset[str] = frozenset()
    """Names of fp32 weights that are never split, for their family keeps them in fp32 whatever the rest is in."""


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What goes into a step."""

    models: Mapping[str, ModelContents]
    """By role; `MAIN` is the run's own. The same roles on every rank."""
    state: Mapping[str, Any]
    """The position of the run, as plain JSON: what is needed to continue beside the tensors."""
    healthy: bool = True
    """False when losses or weights are not finite; one rank's False counts for all."""
    check_finite: bool = False
    """Look through the weights as well, and count the step as unhealthy where one is not finite."""
    split: bool = True
    """Store fp32 weights as a bf16 model and a residual. False: as an fp32 model."""
    arena: Arena | None = None
    """Host memory to put blocks together in; None: memory that is given back after the save."""

    @property
    def weights(self) -> list[Shard]:
        """The pieces of all models."""
        return [shard for model in self.models.values() for shard in model.weights]

    @property
    def training(self) -> list[Shard]:
        """The pieces of all models' slots."""
        return [shard for model in self.models.values() for shard in model.training]


@dataclass(frozen=True, slots=True)
class Assets:
    """The small files of a Hugging Face directory, in memory; a `ModelContents.write_assets`."""

    files: Mapping[str, bytes]
    """By path below the directory, with forward slashes."""

    @classmethod
    def written_by(cls, write_assets: Callable[[Path], None]) -> Assets:
        """What the function writes into a directory."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_assets(directory)
            paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
            files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
        return cls(files)

    def __call__(self, directory: Path) -> None:
        """Write them."""
        for name, data in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


@dataclass(frozen=True, slots=True)
class _Held:
    """A piece as it will be stored, and how its elements come out of a shard."""

    piece: Piece
    shard: Shard
    convert: Callable[[Tensor, Tensor], None] | None
    """Writes the shard's elements as they are stored; None when they are stored as they are."""


class _Elements:
    """The elements of this rank's pieces."""

    def __init__(self, held: Sequence[_Held]) -> None:
        self._held = held

    def read(self, move: Move, into: Tensor) -> None:
        """See `burnish.checkpoint.writer.Elements`."""
        held = self._held[move.have]
        (held.convert or _copy)(held.shard.part(move.box), into)

    def as_stored(self, move: Move) -> Tensor | None:
        """See `burnish.checkpoint.writer.Elements`."""
        held = self._held[move.have]
        return held.shard.part(move.box) if held.convert is None else None


def _copy(elements: Tensor, into: Tensor) -> None:
    into.copy_(elements)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this rank's disk gets what it has of a step, and under which names."""

    inflight: Path
    """The directory while it is written."""
    final: Path
    """The same when it is sealed."""
    seal: str
    """The name of COMMIT in it."""
    disk: int | None
    """The disk, on its leader; None on the other ranks, which make and name nothing."""

    @classmethod
    def of(cls, root: Path, step: int, name: str, disks: Disks, rank: int) -> _Place:
        inflight = root / f"{INFLIGHT}{step:08d}.{name}"
        disk = disks.of_rank[rank] if rank in disks.leaders else None
        if disks.are_several:
            return cls(inflight, root / f"{PORTION}{step:08d}.{name}", SEAL, disk)
        return cls(inflight, root / step_name(step), COMMIT, disk)

    def discard(self, storage: Storage) -> None:
        """Remove what is no step, as far as the disk lets go of it."""
        for path in (self.inflight, self.final):
            if self.disk is not None and path.name.startswith((INFLIGHT, PORTION)):
                with suppress(OSError):
                    discard(storage, path, path.parent / TRASH)


@dataclass(frozen=True, slots=True)
class _Sealed:
    """The manifest of a step, and its COMMIT, as they are written."""

    manifest: bytes
    commit: bytes

    @classmethod
    def of(cls, manifest: Manifest, *, healthy: bool) -> _Sealed:
        encoded = manifest.encode()
        commit = Commit(
            version=__version__,
            uuid=manifest.uuid,
            step=manifest.step,
            manifest_sha256=sha256(encoded),
            total_bytes=manifest.total_bytes,
            healthy=healthy,
        )
        return cls(encoded, commit.encode())


@dataclass(frozen=True, slots=True)
class _Told:
    """What ranks tell each other before a save."""

    step: int
    uuid: str
    healthy: bool
    device: torch.device | None
    plan: str


def save_step(
    root: Path,
    step: int,
    contents: Contents,
    planner: SavePlanner,
    storage: Storage,
    require_room: Callable[[int], None],
    fence: Callable[[], None] | None = None,
) -> Path:
    """Write and commit a step below `root`; return its directory, or this rank's partial checkpoint. Collective.

    On the leader of each disk `require_room` is called with the needed bytes before anything is written, and `fence` before the
    step is sealed. An error on any rank, theirs included, is raised on all and leaves committed steps unchanged. Raises
    `BurnishError` if the step exists or writing fails.
    """
    layout, disks = planner.layout, planner.disks
    with agree(layout):
        held = list(_held(contents))
        pieces = PieceTable.of(each.piece for each in held)
        finite = not contents.check_finite or all_finite(contents.weights)
    mine = _Told(
        step,
        uuid.uuid4().hex,
        contents.healthy and finite,
        accelerator_of([*contents.weights, *contents.training]),
        planner.digest(pieces),
    )
    told = gather_objects(mine, layout)
    _check_same_step(told)
    plan = planner.plan(pieces, contents.models, [theirs.plan for theirs in told])
    place = _Place.of(root, step, told[0].uuid, disks, layout.rank)
    empty = Manifest(told[0].uuid, step, layout.world, {})
    small: dict[str, bytes] = {}
    device = meeting_place([theirs.device for theirs in told], mine.device)
    what = f"step {step} could not be saved"
    arena = contents.arena or Arena(torch.device("cpu"))
    writer = BlockWriter(place.inflight, plan.writing, layout, device, arena)
    try:
        with agree(layout), naming_failures(what):
            if layout.is_main:
                small |= {**plan.indices, **_small_files(contents)}
                _check_manifest(replace(empty, files=_records(plan.writing, {}, small)))
            if place.disk is not None:
                check_new(root, step, storage)
                files = plan.writing.files_on(place.disk)
                require_room(sum(file.size for file in files) + sum(map(len, small.values())))
                _lay_out(place.inflight, files, small, storage)
        hashes = writer.write(_Elements(held), storage, what)
        all_hashes, sealed = gather_objects(hashes, layout), None
        with agree(layout):
            if layout.is_main:
                records = _records(plan.writing, _together(plan.writing, all_hashes), small)
                healthy = all(theirs.healthy for theirs in told)
                sealed = _Sealed.of(replace(empty, files=records), healthy=healthy)
        if disks.are_several:
            sealed = from_main(sealed, layout)
        with agree(layout), naming_failures(what):
            if place.disk is not None and sealed is not None:
                if fence is not None:
                    fence()
                _commit(place, sealed, storage)
    except BaseException:
        place.discard(storage)
        raise
    return place.final


def _held(contents: Contents) -> Iterator[_Held]:
    for role, model in contents.models.items():
        _check_slots(model.training, {MODEL, RESIDUAL, *contents.models})
        yield from _held_of(model, prefix_of(role), split=contents.split)


def _check_slots(shards: Iterable[Shard], taken: Container[str]) -> None:
    """Refuse names that are not those of a slot and a weight."""
    for shard in shards:
        slot, _, name = shard.spec.name.partition("/")
        if not name or slot in taken or not slot.isidentifier():
            raise ValueError(f"{shard.spec.name!r} is not the name of a slot and a weight")


def _held_of(model: ModelContents, prefix: str, *, split: bool) -> Iterator[_Held]:
    for shard in model.weights:
        key, beside = (f"{prefix}{each}/{shard.spec.name}" for each in (MODEL, RESIDUAL))
        if split and shard.tensor.dtype == torch.float32 and shard.spec.name not in model.whole:
            yield _Held(_piece(shard, key, torch.bfloat16), shard, rounded)
            yield _Held(_piece(shard, beside, torch.int16), shard, residual)
        else:
            yield _Held(_piece(shard, key, shard.tensor.dtype), shard, None)
    for shard in model.training:
        key = f"{prefix}{shard.spec.name}"
        yield _Held(_piece(shard, key, shard.tensor.dtype), shard, None)


def _piece(shard: Shard, key: str, dtype: torch.dtype) -> Piece:
    return Piece(key, shard.spec.shape, shard.box, dtype)


def _check_same_step(told: Sequence[_Told]) -> None:
    steps = sorted({theirs.step for theirs in told})
    if len(steps) > 1:
        raise BurnishError(
            "ranks are saving different steps",
            have=", ".join(map(str, steps)),
            want="one step",
            do="start all ranks again, with one configuration, from one checkpoint",
        )


def _small_files(contents: Contents) -> dict[str, bytes]:
    """State and assets by path below the step."""
    state = encode_json(dict(contents.state))
    if len(state) > STATE_LIMIT:
        raise BurnishError(
            f"the run's state is too large for {STATE}",
            have=f"{len(state)} bytes",
            want=f"{STATE_LIMIT} bytes at most",
            do="keep out of it what grows with the run",
        )
    small = {STATE: state}
    for role, model in contents.models.items():
        for name, data in Assets.written_by(model.write_assets).files.items():
            small[f"{prefix_of(role)}{MODEL}/{name}"] = data
    return small


def all_finite(shards: Sequence[Shard]) -> bool:
    """Return whether no tensor holds a NaN or infinity, with one wait for the device; integers and 8-bit floats count as finite."""
    tensors = [shard.tensor.detach() for shard in shards if shard.tensor.numel()]
    extremes = [
        extreme.float()
        for tensor in tensors
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1
        for extreme in torch.aminmax(tensor)
    ]
    return not extremes or bool(torch.stack(extremes).isfinite().all())


def check_new(root: Path, step: int, storage: Storage) -> None:
    """Raise `BurnishError` when there is a step of this number."""
    if storage.kind(root / step_name(step)) is not None:
        raise BurnishError(
            f"step {step} exists already",
            have=root / step_name(step),
            want="a step is never overwritten",
            do="move it away, or continue from it",
        )


def _lay_out(
    inflight: Path, files: Sequence[PlannedFile], small: Mapping[str, bytes], storage: Storage
) -> None:
    """Make the directories, the small files whole, the large ones empty at their final size."""
    names = [*small, *(file.path for file in files)]
    for path in sorted({inflight, *((inflight / name).parent for name in names)}):
        storage.make_dirs(path)
    for file in files:
        with storage.create(inflight / file.path, file.size):
            pass
    write_new(storage, {inflight / name: data for name, data in small.items()})


def _together(plan: WritePlan, hashes: Iterable[BlockHashes]) -> BlockHashes:
    """All ranks' hashes; every block of every file has exactly one."""
    known: BlockHashes = {}
    for theirs in hashes:
        if known.keys() & theirs.keys():
            [(index, number), *_] = sorted(known.keys() & theirs.keys())
            raise _misplanned(plan.files[index], number, "was written by two ranks")
        known |= theirs
    for index, file in enumerate(plan.files):
        for number in range(-(-file.size // plan.block_bytes)):
            if (index, number) not in known:
                raise _misplanned(file, number, "was written by no rank")
    return known


def _records(
    plan: WritePlan, hashes: BlockHashes, small: Mapping[str, bytes]
) -> dict[str, FileRecord]:
    """Return the manifest's records of the files; tensor files may lack hashes yet."""
    records = {path: record_of(data) for path, data in small.items()}
    for index, file in enumerate(plan.files):
        numbers = range(-(-file.size // plan.block_bytes) if hashes else 0)
        blocks = tuple(hashes[index, number] for number in numbers)
        records[file.path] = FileRecord(file.size, plan.block_bytes, blocks)
    return records


def _check_manifest(manifest: Manifest) -> None:
    """Raise `BurnishError` if the manifest would be too long to be read again."""
    size, files = manifest.encoded_bytes(), len(manifest.files)
    if size > MANIFEST_LIMIT or files > MAX_FILES:
        raise BurnishError(
            f"step {manifest.step} is too large for one manifest, which could not be read again",
            have=f"{manifest.total_bytes / 1e12:.1f} TB in {files} files: {size} bytes of {MANIFEST}",
            want=f"{MANIFEST_LIMIT} bytes for {MAX_FILES} files at most",
            do="train an adapter with model.lora.rank",
        )


def _misplanned(file: PlannedFile, number: int, what: str) -> BurnishError:
    return BurnishError(
        f"block {number} of {file.path} {what}",
        want="one writer for each",
        do="see that all ranks run the same version; where they do, it is a mistake in Burnish",
    )


def _commit(place: _Place, sealed: _Sealed, storage: Storage) -> None:
    """Seal the directory and rename it. Before the rename the step does not exist; after it, it is whole."""
    files = {MANIFEST: sealed.manifest, place.seal: sealed.commit}
    write_new(storage, {place.inflight / name: data for name, data in files.items()})
    sync_dirs(storage, _directories(place.inflight, storage))
    storage.rename(place.inflight, place.final)
    storage.sync_dir(place.final.parent)


def _directories(path: Path, storage: Storage) -> Iterator[Path]:
    """A directory and all below it."""
    yield path
    for entry in storage.entries(path):
        if entry.kind == "directory":
            yield from _directories(path / entry.name, storage)


@dataclass(frozen=True, slots=True)
class Saved:
    """A step that is committed."""

    path: Path
    """Its directory, or that of this rank's portion of it."""
    warning: NotRemovedError | None
    """Rank 0: what could not be removed beside it; None where all could."""


@dataclass(frozen=True, slots=True)
class Saver:
    """Where steps are saved, by whom, and which of them stay."""

    root: Path
    """The run's `checkpoints/`."""
    planner: SavePlanner = field(compare=False, repr=False)
    """Who writes what, and where to; it keeps the plan from save to save, in each process that has this."""
    storage: Storage
    """The disk."""
    retention: Retention
    """Which steps stay."""
    reserve_bytes: int
    """What stays free on the disk."""
    token: Token | None = None
    """The leader of a disk: the right to commit below `root`."""

    @property
    def layout(self) -> Layout:
        """This process among those that save together."""
        return self.planner.layout

    @property
    def disks(self) -> Disks:
        """Where these write to."""
        return self.planner.disks

    def save(self, step: int, contents: Contents, fence: Callable[[], None] | None = None) -> Saved:
        """Commit a step and remove those that retention no longer keeps. Collective.

        An error on any rank is raised on all and leaves earlier steps unchanged. `fence` is called on the leader of each disk before the
        step is sealed; if it raises, the step does not come to exist.
        """

        def check() -> None:
            if self.token is not None:
                self.token.check()
            if fence is not None:
                fence()

        def require(needed: int) -> None:
            waiting = partial(self.retention.waiting, self.root, self.storage)
            require_room(self.root, step, needed, self.reserve_bytes, self.storage, waiting)

        path = save_step(self.root, step, contents, self.planner, self.storage, require, check)
        with agree(self.layout):
            return Saved(path, self.let_go() if self.layout.is_main else None)

    @property
    def leads(self) -> bool:
        """Whether this rank makes and names what is on its disk."""
        return self.layout.rank in self.disks.leaders

    def holds(self, step: int) -> bool:
        """Whether this rank's disk has the step, or its portion, sealed."""
        if self.disks.are_several:
            return step in portion_paths(self.root, self.storage).values()
        with suppress(CorruptError):
            return bool(open_step(self.root / step_name(step), self.storage))
        return False

    def discard(self, step: int, *, portion: bool) -> NotRemovedError | None:
        """Remove the remains of a failed save, its partial checkpoint too; log what could not be removed. For leaders."""
        starts = (INFLIGHT, PORTION) if portion else (INFLIGHT,)
        removals = Removals(self.root)
        with removals.trying():
            for entry in self.storage.entries(self.root):
                if entry.name.startswith(tuple(f"{start}{step:08d}." for start in starts)):
                    discard(self.storage, self.root / entry.name, self.root / TRASH)
        return removals.error()

    def let_go(self) -> NotRemovedError | None:
        """Remove steps that retention no longer keeps; log what could not be removed. For rank 0."""
        try:
            self.retention.apply(self.root, self.storage)
        except NotRemovedError as error:
            return error
        return None
