"""Check that the bytes on disk are those that were committed: every block against its hash. No torch here.

Readers of tensors check their blocks with the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePath

import xxhash

from burnish.checkpoint.manifest import MAX_BLOCK_BYTES, FileRecord, block_hash
from burnish.checkpoint.steps import Committed, open_step
from burnish.errors import CorruptError, few
from burnish.files.safetensors import SUFFIX, Header, header_size, parse_header
from burnish.files.storage import LocalStorage, ReadableFile, Source

READ_BYTES = 4 << 20
"""Small blocks that follow each other are read from a disk that answers slowly so many bytes at a time."""

_HASHED_AT_ONCE = 256 << 10
# Read and then hashed while the processor's cache still has it.


class DamagedBlock(CorruptError):
    """A block of a step's file whose bytes are not those that were written."""

    def __init__(
        self, file: PurePath, start: int, stop: int, holds: tuple[str, ...], *, have: str, want: str
    ) -> None:
        super().__init__(
            f"{file} is damaged: bytes {start} to {stop} are not those that were written",
            have=f"{have}; they hold {few(holds) or 'no tensor'}",
            want=want,
            do="use another checkpoint, and check the disk",
        )
        self.file = file
        """Its path."""
        self.start, self.stop = start, stop
        """First byte of the block in the file, and one past the last."""
        self.holds = holds
        """The tensors that lie in it, and "the header" where it begins the file."""
        self._hashes = (have, want)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when the error crosses a process boundary."""
        place = (self.file, self.start, self.stop, self.holds)
        return (_rebuild, (self.problem, place, *self._hashes))


def _rebuild(
    problem: str, place: tuple[PurePath, int, int, tuple[str, ...]], have: str, want: str
) -> DamagedBlock:
    error = DamagedBlock(*place, have=have, want=want)
    # The text may have been added to since: which rank it comes from.
    CorruptError.__init__(error, problem, have=error.have, want=error.want, do=error.do)
    return error


def verify(path: PurePath, storage: Source | None = None) -> Iterator[CorruptError]:
    """Read all of the step at `path`; yield an error for each damaged block, naming file and tensors.

    A committed header that describes the impossible is an error too. Raises `CorruptError` if COMMIT, manifest, state or the list of
    files is damaged.
    """
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    yield from verify_files(step, step.manifest.files, storage)


def verify_files(
    step: Committed, names: Iterable[str], storage: Source | None = None
) -> Iterator[CorruptError]:
    """Do the same for some files of an open step. Reads ahead while it hashes."""
    storage = storage or LocalStorage()
    largest = max((_run(record) for record in step.manifest.files.values()), default=0)
    largest = min(largest, MAX_BLOCK_BYTES, step.manifest.total_bytes)
    buffers = [memoryview(bytearray(largest)) for _ in range(storage.reads_at_once + 1)]
    with ThreadPoolExecutor(storage.reads_at_once) as reader:
        for name in names:
            errors = 0
            for error in _verify_file(step, name, storage, reader, buffers):
                errors += 1
                yield error
            if not errors and name.endswith(SUFFIX):
                yield from _header_problem(step, name, storage)


def _verify_file(
    step: Committed,
    name: str,
    storage: Source,
    reader: ThreadPoolExecutor,
    buffers: list[memoryview],
) -> Iterator[CorruptError]:
    record = step.manifest.files[name]
    ahead: list[tuple[int, memoryview, Future[None]]] = []
    with storage.open(step.path / name) as file:
        for turn, start in enumerate(range(0, record.size, _run(record))):
            data = buffers[turn % len(buffers)][: min(_run(record), record.size - start)]
            first = start // record.block_bytes
            ahead.append((first, data, reader.submit(file.pread_into, data, start)))
            if len(ahead) == len(buffers):
                yield from _damaged(file, step, name, *ahead.pop(0))
        while ahead:
            yield from _damaged(file, step, name, *ahead.pop(0))


def _run(record: FileRecord) -> int:
    """Bytes of whole blocks that are read at a time."""
    return max(1, READ_BYTES // record.block_bytes) * record.block_bytes


def _damaged(
    file: ReadableFile,
    step: Committed,
    name: str,
    first: int,
    data: memoryview,
    read: Future[None],
) -> Iterator[CorruptError]:
    """Yield the errors of blocks once they were read; after a read error each block is read again."""
    size = step.manifest.files[name].block_bytes
    failed = isinstance(read.exception(), (OSError, EOFError))
    if not failed:
        read.result()
    for number, start in enumerate(range(0, len(data), size), start=first):
        block = data[start : start + size]
        try:
            if failed:
                read_blocks(file, step, name, number, block)
            else:
                _check(file, step, name, number, block_hash(block))
        except OSError as error:
            yield _damage(file, step, name, number, str(error))
        except CorruptError as error:
            yield error


def verify_quickly(path: PurePath, storage: Source | None = None) -> Iterator[CorruptError]:
    """Check everything but tensors: COMMIT, manifest, names, sizes, small files and headers. Yields and raises as `verify` does."""
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    for name in step.manifest.files:
        if name.endswith(SUFFIX):
            yield from _header_problem(step, name, storage)
        else:
            try:
                read_file(step, name, storage)
            except CorruptError as error:
                yield error


def check_small_files(step: Committed, storage: Source | None = None) -> None:
    """Raise `DamagedBlock` unless all files without tensors are what was committed: configuration, tokenizer."""
    for name in step.manifest.files:
        if not name.endswith(SUFFIX):
            read_file(step, name, storage or LocalStorage())


def read_file(step: Committed, name: str, storage: Source) -> bytes:
    """Return a small file's content. Raises `DamagedBlock` where it is not what was committed."""
    data = bytearray(step.manifest.files[name].size)
    with storage.open(step.path / name) as file:
        read_blocks(file, step, name, 0, memoryview(data))
    return bytes(data)


def _header_problem(step: Committed, name: str, storage: Source) -> Iterator[CorruptError]:
    try:
        checked_header(step, name, storage)
    except CorruptError as error:
        yield error


def checked_header(step: Committed, name: str, storage: Source) -> Header:
    """Return the header of a step's tensor file, out of blocks that were checked."""
    record, path = step.manifest.files[name], step.path / name

    def blocks(start: int, stop: int) -> bytes:
        first = start // record.block_bytes
        stop = -(-min(stop, record.size) // record.block_bytes) * record.block_bytes
        data = bytearray(min(stop, record.size) - first * record.block_bytes)
        read_blocks(file, step, name, first, memoryview(data))
        return bytes(data)

    with storage.open(path) as file:
        data = blocks(0, min(record.block_bytes, record.size))
        size = header_size(path, data, record.size)
        if size > len(data):
            data += blocks(len(data), size)
    return parse_header(path, data[:size], record.size)


def read_blocks(
    file: ReadableFile,
    step: Committed,
    name: str,
    first: int,
    into: memoryview,
    at_once: int = _HASHED_AT_ONCE,
) -> None:
    """Fill memory with whole blocks of a file, from `first` on, and check each against its hash.

    Reads at most `at_once` bytes at a time. Raises `DamagedBlock` naming file and tensors; the memory then holds what was read.
    """
    size = step.manifest.files[name].block_bytes
    run = max(1, at_once // size) * size
    for start in range(0, len(into), run):
        blocks, number = into[start : start + run], first + start // size
        if run == size:
            _check(file, step, name, number, _read_block(file, blocks, number * size))
            continue
        ended = _fill(file, blocks, number * size)
        for at in range(0, len(blocks), size):
            found = ended or block_hash(blocks[at : at + size])
            _check(file, step, name, number + at // size, found)


def _read_block(file: ReadableFile, into: memoryview, offset: int) -> str:
    """Read a block piece by piece; return its hash, or where the file ends before."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(into), _HASHED_AT_ONCE):
        some = into[start : start + _HASHED_AT_ONCE]
        if ended := _fill(file, some, offset + start):
            return ended
        digest.update(some)
    return digest.hexdigest()


def _fill(file: ReadableFile, data: memoryview, start: int) -> str | None:
    """Read into all of `data`; return where the file ends before."""
    try:
        file.pread_into(data, start)
    except EOFError as error:
        return str(error)
    return None


def _check(file: ReadableFile, step: Committed, name: str, number: int, found: str) -> None:
    """Raise `DamagedBlock` unless a block has the hash that it was committed with."""
    if found != step.manifest.files[name].blocks[number]:
        raise _damage(file, step, name, number, found)


def _damage(
    file: ReadableFile, step: Committed, name: str, number: int, found: str
) -> DamagedBlock:
    record = step.manifest.files[name]
    start = number * record.block_bytes
    stop = min(start + record.block_bytes, record.size)
    holds = _tensors(file, step, name, start, stop)
    return DamagedBlock(
        step.path / name, start, stop, holds, have=found, want=record.blocks[number]
    )


def _tensors(
    file: ReadableFile, step: Committed, name: str, start: int, stop: int
) -> tuple[str, ...]:
    """Return the tensors in a range of a file, as far as its header, perhaps damaged, can tell."""
    if not name.endswith(SUFFIX):
        return ()
    path, file_size = step.path / name, step.manifest.files[name].size
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
