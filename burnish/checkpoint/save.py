"""Writing one step: what goes into it, and the moment at which it exists.

Everything is written into a directory that has not the name of a step; manifest and COMMIT come
last, then one rename. Left out: how tensors become blocks (`burnish.checkpoint.write`), when to
save and what to keep (`burnish.checkpoint.directory`).
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish import __version__
from burnish.checkpoint.blocks import PlannedFile, Stored, plan_files
from burnish.checkpoint.committed import INFLIGHT, TRASH, step_name
from burnish.checkpoint.dtypes import dtype_name
from burnish.checkpoint.manifest import (
    BLOCK_BYTES,
    COMMIT,
    MANIFEST,
    STATE,
    STATE_LIMIT,
    Commit,
    FileRecord,
    Manifest,
    record_of,
    sha256,
)
from burnish.checkpoint.split import residual, rounded
from burnish.checkpoint.write import BlockHashes, BlockWriter
from burnish.errors import BurnishError
from burnish.files.durable import discard, naming_failures, write_durably
from burnish.files.storage import Storage
from burnish.files.strict_json import encode_json
from burnish.parallel.collectives import agree, gather_objects
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Piece, Shard
from burnish.parallel.transfer import Move, accelerator_of, meeting_place

_MODEL, _RESIDUAL = "model", "residual"


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What goes into a step. Every rank gives its own shards; of the rest, rank 0's counts."""

    weights: Sequence[Shard]
    """This rank's pieces of the model, by canonical name."""
    training: Sequence[Shard]
    """This rank's pieces of the optimizer's slots, named `slot/weight`."""
    state: Mapping[str, Any]
    """The position of the run, as plain JSON: what is needed to continue beside the tensors."""
    write_assets: Callable[[Path], None]
    """Writes what makes `model/` a Hugging Face directory (config.json, tokenizer files) into the directory it is given."""
    healthy: bool = True
    """False when losses or weights are not finite; one rank's False counts for all."""
    check_finite: bool = False
    """Look through the weights as well, and count the step as unhealthy where one is not finite."""
    split: bool = True
    """Store fp32 weights as a bf16 model and a residual. False: as an fp32 model."""


@dataclass(frozen=True, slots=True)
class Assets:
    """The small files of a Hugging Face directory, in memory; a `Contents.write_assets`."""

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
    take: Callable[[Tensor], Tensor]

    def read(self, move: Move) -> Tensor:
        """The elements of a move, as they are stored."""
        return self.take(self.shard.tensor[move.box.relative_to(self.shard.box).slices])


@dataclass(frozen=True, slots=True)
class _Told:
    """What ranks tell each other before a save."""

    step: int
    uuid: str
    healthy: bool
    device: torch.device | None
    pieces: list[Piece]


def save_step(
    root: Path,
    step: int,
    contents: Contents,
    layout: Layout,
    storage: Storage,
    reserve_bytes: int,
    fence: Callable[[], None] | None = None,
) -> Path:
    """Write and commit a step below `root`; returns its directory. Collective.

    `fence` is called on rank 0 before the step is sealed. An error on any rank, what `fence` raises
    included, is raised on every rank, and leaves what was committed before untouched.
    Raises `BurnishError` when the step exists, when the disk has not `reserve_bytes` more room than
    is needed (before anything is written), or when writing fails.
    """
    with agree(layout):
        held = list(_held(contents))
        finite = not contents.check_finite or all_finite(contents.weights)
    mine = _Told(
        step,
        uuid.uuid4().hex,
        contents.healthy and finite,
        accelerator_of([*contents.weights, *contents.training]),
        [each.piece for each in held],
    )
    told = gather_objects(mine, layout)
    _check_same_step(told)
    name, have = told[0].uuid, [theirs.pieces for theirs in told]
    files, small = plan_files(_stored(have))
    inflight = root / f"{INFLIGHT}{step:08d}.{name}"
    device = meeting_place([theirs.device for theirs in told], mine.device)
    what = f"step {step} could not be saved"
    writer = BlockWriter(inflight, files, have, layout, device)
    try:
        with agree(layout), naming_failures(what):
            if layout.is_main:
                small |= _small_files(contents)
                check_new(root, step, storage)
                needed = sum(file.size for file in files) + sum(map(len, small.values()))
                _check_room(root, step, needed, reserve_bytes, storage)
                _lay_out(inflight, files, small, storage)
        hashes = writer.write(lambda move: held[move.have].read(move), storage, what)
        all_hashes = gather_objects(hashes, layout)
        with agree(layout), naming_failures(what):
            if layout.is_main:
                records = _records(files, all_hashes) | {p: record_of(d) for p, d in small.items()}
                manifest = Manifest(name, step, layout.world, records)
                healthy = all(theirs.healthy for theirs in told)
                if fence is not None:
                    fence()
                _commit(inflight, root / step_name(step), manifest, healthy, storage)
    except BaseException:
        if layout.is_main:
            with suppress(OSError):
                discard(storage, inflight, root / TRASH)
        raise
    return root / step_name(step)


def _held(contents: Contents) -> Iterator[_Held]:
    for shard in contents.weights:
        name = shard.spec.name
        if contents.split and shard.tensor.dtype == torch.float32:
            yield _Held(_piece(shard, f"{_MODEL}/{name}", torch.bfloat16), shard, rounded)
            yield _Held(_piece(shard, f"{_RESIDUAL}/{name}", torch.int16), shard, residual)
        else:
            yield _Held(_piece(shard, f"{_MODEL}/{name}", shard.tensor.dtype), shard, Tensor.detach)
    for shard in contents.training:
        slot, _, name = shard.spec.name.partition("/")
        if not slot or not name or slot in (_MODEL, _RESIDUAL) or not slot.isidentifier():
            raise ValueError(f"{shard.spec.name!r} is not the name of a slot and a weight")
        yield _Held(_piece(shard, shard.spec.name, shard.tensor.dtype), shard, Tensor.detach)


def _piece(shard: Shard, key: str, dtype: torch.dtype) -> Piece:
    return Piece(key, shard.spec.shape, shard.box, dtype)


def _stored(have: Iterable[Iterable[Piece]]) -> list[Stored]:
    """Every tensor that any rank has a piece of, once."""
    found: dict[str, Stored] = {}
    for pieces in have:
        for piece in pieces:
            stem, _, name = piece.name.partition("/")
            directory = _MODEL if stem == _MODEL else "training"
            dtype = dtype_name(piece.dtype, name)
            stored = Stored(directory, stem, name, dtype, piece.shape)
            if found.setdefault(piece.name, stored) != stored:
                raise BurnishError(
                    f"ranks disagree about tensor {piece.name}",
                    have=f"{found[piece.name].dtype} {list(found[piece.name].shape)}",
                    want=f"{dtype} {list(piece.shape)}",
                )
    return list(found.values())


def _check_same_step(told: Sequence[_Told]) -> None:
    steps = sorted({theirs.step for theirs in told})
    if len(steps) > 1:
        raise BurnishError("ranks are saving different steps", have=steps, want="one step")


def _small_files(contents: Contents) -> dict[str, bytes]:
    """State and assets by path below the step."""
    state = encode_json(dict(contents.state))
    if len(state) > STATE_LIMIT:
        raise BurnishError(
            f"the run's state is too large for {STATE}",
            have=f"{len(state)} bytes",
            want=f"{STATE_LIMIT} bytes at most",
        )
    assets = Assets.written_by(contents.write_assets)
    return {STATE: state, **{f"{_MODEL}/{name}": data for name, data in assets.files.items()}}


def all_finite(shards: Sequence[Shard]) -> bool:
    """Whether none of these holds a NaN or an infinity; one wait for the device.

    What has no norm in torch (integers, 8-bit floats) counts as finite.
    """
    tensors = [shard.tensor.detach() for shard in shards if shard.tensor.numel()]
    largest = [
        torch.linalg.vector_norm(tensor, torch.inf).float()
        for tensor in tensors
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1
    ]
    return not largest or bool(torch.stack(largest).isfinite().all())


def check_new(root: Path, step: int, storage: Storage) -> None:
    """Raise `BurnishError` when there is a step of this number."""
    if any(entry.name == step_name(step) for entry in storage.entries(root)):
        raise BurnishError(
            f"step {step} exists already",
            have=root / step_name(step),
            want="a step is never overwritten",
            do="move it away, or continue from it",
        )


def _check_room(root: Path, step: int, needed: int, reserve: int, storage: Storage) -> None:
    storage.make_dirs(root)
    free = storage.free_bytes(root)
    if free < needed + reserve:
        raise BurnishError(
            f"the disk has no room for step {step}",
            have=f"{free / 1e9:.3f} GB free where {root} lies",
            want=f"{needed / 1e9:.3f} GB for the step and {reserve / 1e9:.3f} GB in reserve",
            do="free some space, or set checkpoint.keep_last or checkpoint.reserve_gb lower",
        )


def _lay_out(
    inflight: Path, files: Sequence[PlannedFile], small: Mapping[str, bytes], storage: Storage
) -> None:
    """Make the directories, the small files whole, the large ones empty at their final size."""
    for path in sorted({(inflight / name).parent for name in [*small, *(f.path for f in files)]}):
        storage.make_dirs(path)
    for file in files:
        with storage.create(inflight / file.path, file.size):
            pass
    for name, data in small.items():
        with storage.create(inflight / name, len(data)) as opened:
            opened.pwrite(data, 0)
            opened.sync()


def _records(files: Sequence[PlannedFile], hashes: Iterable[BlockHashes]) -> dict[str, FileRecord]:
    """Put the ranks' hashes together; every block of every file has exactly one."""
    known: BlockHashes = {}
    for theirs in hashes:
        if known.keys() & theirs.keys():
            raise BurnishError("two ranks wrote the same block", have=known.keys() & theirs.keys())
        known |= theirs
    records = {}
    for index, file in enumerate(files):
        numbers = range(-(-file.size // BLOCK_BYTES))
        if any((index, number) not in known for number in numbers):
            raise BurnishError(f"a block of {file.path} was written by nobody")
        blocks = tuple(known[index, number] for number in numbers)
        records[file.path] = FileRecord(file.size, BLOCK_BYTES, blocks)
    return records


def _commit(
    inflight: Path, final: Path, manifest: Manifest, healthy: bool, storage: Storage
) -> None:
    """Seal the directory and give it its name. Before the rename the step does not exist; after it, it is whole."""
    for path in sorted({p for name in manifest.files for p in (inflight / name).parents}):
        if path.is_relative_to(inflight):
            storage.sync_dir(path)
    encoded = manifest.encode()
    write_durably(storage, inflight / MANIFEST, encoded)
    commit = Commit(
        version=__version__,
        uuid=manifest.uuid,
        step=manifest.step,
        manifest_sha256=sha256(encoded),
        total_bytes=manifest.total_bytes,
        healthy=healthy,
    )
    write_durably(storage, inflight / COMMIT, commit.encode())
    storage.rename(inflight, final)
    storage.sync_dir(final.parent)
