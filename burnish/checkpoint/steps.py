"""Find a directory's steps, and check that each is as committed. No torch here."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from queue import SimpleQueue
from typing import Any, TypeVar

from burnish.checkpoint.manifest import (
    ANOTHER_STEP,
    COMMIT,
    COMMIT_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    STATE,
    STATE_LIMIT,
    Commit,
    FileRecord,
    Manifest,
    block_hash,
    parse_commit,
    parse_manifest,
    record_of,
)
from burnish.errors import BurnishError, CorruptError, IncompatibleError, few
from burnish.files.durable import Removals, discard, read_whole
from burnish.files.safetensors import SUFFIX, Header, header_size, parse_header
from burnish.files.storage import LOCAL, LocalStorage, ReadableFile, Source
from burnish.files.strict_json import parse_object

INFLIGHT = ".inflight-"
"""Prefix of the directory of a step that is being written."""
TRASH = "trash"
QUARANTINE = "quarantine"
"""The directory of steps that are being removed, and that of steps that could not be resumed from."""

READ_BYTES = 4 << 20
"""Consecutive small blocks are read this many bytes at a time."""

P = TypeVar("P", bound=PurePath)

_STEP = re.compile(r"step-([0-9]{8,18})")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step whose file names, sizes and small files are verified."""

    path: PurePath
    """Its directory; `path / "model"` is a Hugging Face model directory."""
    commit: Commit
    manifest: Manifest
    state: Mapping[str, Any]
    """The trainer's position: the content of state.json."""
    source: Source = LOCAL
    """The reader of `path`."""

    @property
    def step(self) -> int:
        """Number of training steps done."""
        return self.commit.step

    @property
    def healthy(self) -> bool:
        """Whether losses and weights were finite."""
        return self.commit.healthy


def step_name(step: int) -> str:
    """Return a step's directory name."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """Return the step of a directory's name, or None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def step_paths(root: P, storage: Source) -> dict[int, P]:
    """Return everything with a step's name, oldest first."""
    paths: dict[int, P] = {}
    for entry in storage.entries(root):
        if (step := step_number(entry.name)) is not None:
            paths[step] = root / entry.name
    return dict(sorted(paths.items()))


def read_commit(path: PurePath, storage: Source) -> Commit:
    """Return a step's seal. Raises `CorruptError` if it is missing or damaged."""
    if storage.kind(path) not in ("directory", None):
        raise CorruptError(
            f"{path} is not a directory",
            have="a file, a link or a device",
            do="give the path of the directory itself: links are not followed",
        )
    commit = parse_commit(read_small(path, COMMIT, COMMIT_LIMIT, storage), f"{path / COMMIT}")
    if path.name != step_name(commit.step):
        raise CorruptError(
            f"{path / COMMIT} seals another step",
            have=step_name(commit.step),
            want=path.name,
            do=f"rename the directory to {step_name(commit.step)}",
        )
    return commit


def open_step(path: PurePath, storage: Source = LOCAL, below: str = "") -> CommittedStep:
    """Open a step: check COMMIT, manifest, state and every file's size.

    With `below` ("model/"), open only that directory, without the state; uncommitted files may lie there. Raises `CorruptError`
    for a damaged, missing or foreign file, `IncompatibleError` for another format.
    """
    commit = read_commit(path, storage)
    data = read_small(path, MANIFEST, MANIFEST_LIMIT, storage)
    manifest = parse_manifest(data, commit, f"{path / MANIFEST}")
    files = {name: each for name, each in manifest.files.items() if name.startswith(below)}
    manifest = replace(manifest, files=files)
    sizes = dict(files_below(path / below, below, storage, files if below else None))
    for name in sorted((sizes.keys() - {COMMIT, MANIFEST}) ^ manifest.files.keys()):
        is_there = name in sizes
        raise CorruptError(
            f"{path / name} is {'in no manifest' if is_there else 'missing'}",
            have="a file that was not committed" if is_there else "no such file",
            want="exactly the files of the manifest",
            do=f"move {name} out of the step" if is_there else ANOTHER_STEP,
        )
    for name, record in manifest.files.items():
        if sizes[name] != record.size:
            raise CorruptError(
                f"{path / name} has another size than when it was committed",
                have=f"{sizes[name]} bytes",
                want=f"{record.size} bytes",
                do=ANOTHER_STEP,
            )
    state = {} if below else _state(path, manifest, storage)
    return CommittedStep(path, commit, manifest, state, storage)


def require_healthy(step: CommittedStep) -> None:
    """Raise `CorruptError` for an unhealthy step."""
    if not step.healthy:
        raise CorruptError(
            f"{step.path} is marked unhealthy",
            have="a loss or weights that are not finite",
            want="a step that training can continue from",
            do="look in metrics.jsonl where the losses went wrong, and continue from an older step",
        )


def newest(root: PurePath, storage: Source = LOCAL) -> CommittedStep | None:
    """Return the newest healthy step; None if none was ever committed. Log damaged ones.

    Raises `CorruptError` if none is usable, `IncompatibleError` if all have another format.
    """
    opened: list[CommittedStep] = []
    errors: dict[str, BurnishError] = {}
    for path in step_paths(root, storage).values():
        try:
            opened.append(open_step(path, storage))
        except (CorruptError, IncompatibleError) as error:
            _log.warning("%s", error)
            errors[path.name] = error
    usable = [step for step in opened if step.healthy]
    if usable:
        return usable[-1]
    if not opened and not errors:
        return None
    if not opened and all(isinstance(error, IncompatibleError) for error in errors.values()):
        raise list(errors.values())[-1]
    raise CorruptError(
        f"no checkpoint in {root} can be used",
        have=", ".join(sorted([*errors, *(step.path.name for step in opened)])),
        want="one that is whole and healthy",
        do=f"see what is wrong with each: burnish ckpt verify {root.parent}",
    )


def read_small(path: PurePath, name: str, limit: int, storage: Source) -> bytes:
    """Read a small file. Raises `CorruptError` if it is missing or longer than `limit` bytes."""
    try:
        return read_whole(storage, path / name, limit)
    except FileNotFoundError as error:
        raise CorruptError(
            f"{path} has no {name}",
            have="a step that is not committed",
            do="use another step; where this is a copy, copy it again",
        ) from error
    except (ValueError, EOFError) as error:
        raise CorruptError(f"{path / name} cannot be read", have=error, do=ANOTHER_STEP) from error
    except OSError as error:
        if storage.kind(path / name) == "file":
            raise
        raise CorruptError(f"{path / name} is not a file", have=error, do=ANOTHER_STEP) from error


def files_below(
    path: PurePath, prefix: str, storage: Source, only: Container[str] | None = None
) -> Iterator[tuple[str, int]]:
    """Yield path, with `prefix`, and size of all files, or of `only` these. Raises `CorruptError` for a link or a device."""
    for entry in storage.entries(path):
        name = f"{prefix}{entry.name}"
        if entry.kind == "directory":
            yield from files_below(path / entry.name, f"{name}/", storage, only)
        elif only is not None and name not in only:
            continue
        elif entry.kind == "file":
            yield name, entry.size
        else:
            raise CorruptError(
                f"{path / entry.name} is not a regular file",
                have="a link or a device",
                do="put the file itself there: links are not followed",
            )


def empty_directories(step: CommittedStep) -> Iterator[str]:
    """Yield a step's directories without a committed file."""
    waiting = [""]
    for prefix in waiting:
        for entry in step.source.entries(step.path / prefix):
            name = f"{prefix}{entry.name}/"
            if entry.kind == "directory":
                waiting.append(name)
                if not any(file.startswith(name) for file in step.manifest.files):
                    yield name


def _state(path: PurePath, manifest: Manifest, storage: Source) -> Mapping[str, Any]:
    data = read_small(path, STATE, STATE_LIMIT, storage)
    record = manifest.files.get(STATE)
    if record is None or record != record_of(data, record.block_bytes):
        raise CorruptError(f"{path / STATE} is not what was committed", do=ANOTHER_STEP)
    return parse_object(data, f"{path / STATE}")


def leftovers(root: Path, storage: LocalStorage) -> list[Path]:
    """Return trash and unfinished steps. The lease's holder may use them."""
    trash = [root / TRASH / entry.name for entry in storage.entries(root / TRASH)]
    names = [entry.name for entry in storage.entries(root)]
    return trash + [root / name for name in names if name.startswith(INFLIGHT)]


def clear(root: Path, storage: LocalStorage, removals: Removals) -> None:
    """Remove the leftovers. For the lease's holder."""
    for path in leftovers(root, storage):
        with removals.trying():
            if path.parent.name == TRASH:
                storage.remove(path)
            else:
                discard(storage, path, root / TRASH)


class DamagedBlock(CorruptError):
    """A block that differs from the bytes written."""

    file: PurePath
    start: int
    stop: int
    """One past the last byte."""
    holds: tuple[str, ...]
    """The tensors in the block, and "the header" if a part of it is there."""

    def __reduce__(self) -> tuple[object, ...]:
        place = {name: getattr(self, name) for name in DamagedBlock.__annotations__}
        return (*super().__reduce__(), place)


def verify(
    path: PurePath, storage: Source = LOCAL, *, fast: bool = False
) -> Iterator[CorruptError]:
    """Read a step (tensor files' headers only if `fast`); yield an error for each damaged block and impossible header.

    Raises `CorruptError` if COMMIT, manifest, state or the list of files is damaged.
    """
    step = open_step(path, storage)
    yield from verify_files(step, small_files(step) if fast else step.manifest.files)
    for name in step.manifest.files if fast else ():
        if name.endswith(SUFFIX):
            yield from _header_problem(step, name)


def verify_files(step: CommittedStep, names: Iterable[str]) -> Iterator[CorruptError]:
    """Read files in several threads; yield an error for each damaged block and impossible header."""
    largest = max((_run(record) for record in step.manifest.files.values()), default=0)
    threads = step.source.reads_at_once + 1
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(min(largest, step.manifest.total_bytes))))

    def damages(file: ReadableFile, name: str, start: int) -> list[CorruptError]:
        record = step.manifest.files[name]
        buffer = buffers.get()
        data = buffer[: min(_run(record), record.size - start)]
        errors = _damages(file, step, name, start // record.block_bytes, data)
        buffers.put(buffer)
        return errors

    with ThreadPoolExecutor(threads) as pool:
        for name in names:
            record = step.manifest.files[name]
            is_whole = True
            with step.source.open(step.path / name) as file:
                starts = range(0, record.size, _run(record))
                for errors in pool.map(partial(damages, file, name), starts):
                    is_whole = is_whole and not errors
                    yield from errors
            if is_whole and name.endswith(SUFFIX):
                yield from _header_problem(step, name)


def _run(record: FileRecord) -> int:
    return max(1, READ_BYTES // record.block_bytes) * record.block_bytes


def _damages(
    file: ReadableFile, step: CommittedStep, name: str, first: int, data: memoryview
) -> list[CorruptError]:
    size = step.manifest.files[name].block_bytes
    try:
        read_blocks(file, step, name, first, data)
    except (CorruptError, OSError) as error:
        if len(data) > size:
            starts = range(0, len(data), size)
            blocks = enumerate((data[start : start + size] for start in starts), start=first)
            return [e for n, block in blocks for e in _damages(file, step, name, n, block)]
        if isinstance(error, OSError):
            return [_damage(file, step, name, first, str(error))]
        return [error]
    return []


def small_files(step: CommittedStep) -> list[str]:
    """Return the files without tensors."""
    return [name for name in step.manifest.files if not name.endswith(SUFFIX)]


def read_file(step: CommittedStep, name: str) -> bytes:
    """Return a small file. Raises `DamagedBlock`."""
    data = bytearray(step.manifest.files[name].size)
    with step.source.open(step.path / name) as file:
        read_blocks(file, step, name, 0, memoryview(data))
    return bytes(data)


def _header_problem(step: CommittedStep, name: str) -> Iterator[CorruptError]:
    try:
        checked_header(step, name)
    except CorruptError as error:
        yield error


def checked_header(step: CommittedStep, name: str) -> Header:
    """Return a tensor file's header, from checked blocks."""
    record = step.manifest.files[name]
    path = step.path / name
    data = b""
    size = 1
    with step.source.open(path) as file:
        while len(data) < size:  # the first block says how long the header is
            stop = min(-(-size // record.block_bytes) * record.block_bytes, record.size)
            next_blocks = bytearray(stop - len(data))
            read_blocks(file, step, name, len(data) // record.block_bytes, memoryview(next_blocks))
            data += next_blocks
            size = header_size(path, data, record.size)
    return parse_header(path, data[:size], record.size)


def read_blocks(
    file: ReadableFile, step: CommittedStep, name: str, first: int, into: memoryview
) -> None:
    """Fill memory with whole blocks of a file, from `first` on, and check their hashes.

    Raises `DamagedBlock`; the memory then holds what was read.
    """
    record = step.manifest.files[name]
    size = record.block_bytes
    run = _run(record)
    for start in range(0, len(into), run):
        blocks = into[start : start + run]
        number = first + start // size
        early_end = None
        try:
            file.pread_into(blocks, number * size)
        except EOFError as error:
            early_end = str(error)
        for at in range(0, len(blocks), size):
            actual = early_end or block_hash(blocks[at : at + size])
            if actual != record.blocks[number + at // size]:
                raise _damage(file, step, name, number + at // size, actual)


def _damage(
    file: ReadableFile, step: CommittedStep, name: str, number: int, actual: str
) -> DamagedBlock:
    record = step.manifest.files[name]
    path = step.path / name
    start = number * record.block_bytes
    stop = min(start + record.block_bytes, record.size)
    holds = _tensors(file, step, name, start, stop)
    error = DamagedBlock(
        f"{path} is damaged: bytes {start} to {stop} are not those that were written",
        have=f"{actual}; they hold {few(holds) or 'no tensor'}",
        want=record.blocks[number],
        do="use another checkpoint, and check the disk",
    )
    error.file = path
    error.start = start
    error.stop = stop
    error.holds = holds
    return error


def _tensors(
    file: ReadableFile, step: CommittedStep, name: str, start: int, stop: int
) -> tuple[str, ...]:
    if not name.endswith(SUFFIX):
        return ()
    path = step.path / name
    file_size = step.manifest.files[name].size
    prefix = bytearray(min(8, file_size))
    try:
        file.pread_into(prefix, 0)
        data = bytearray(header_size(path, prefix, file_size))
        file.pread_into(data, 0)
        header = parse_header(path, bytes(data), file_size)
    except (CorruptError, EOFError, OSError):
        return ("the header",)
    names = [e.name for e in header.entries.values() if e.begin < stop and start < e.end]
    return (*["the header"] * (start < header.size), *names)
