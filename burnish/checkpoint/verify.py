"""Whether the bytes on disk are those that were committed: every block against its hash.

Without torch, in two blocks of memory, or nine for what is remote. Readers of tensors use the same check on the blocks they
read.
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
    """Read all of the step at `path`; yields an error per damaged block, naming file and tensors.

    The next blocks are read while one is hashed. A header that is what was committed and yet says
    what cannot be is a problem too. Raises `CorruptError` when COMMIT, manifest, state or the
    list of files is not in order.
    """
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    yield from verify_files(step, step.manifest.files, storage)


def verify_files(
    step: Committed, names: Iterable[str], storage: Source | None = None
) -> Iterator[CorruptError]:
    """The same of some files of a step that was opened."""
    storage = storage or LocalStorage()
    largest = max((record.block_bytes for record in step.manifest.files.values()), default=0)
    largest = min(largest, MAX_BLOCK_BYTES, step.manifest.total_bytes)
    buffers = [memoryview(bytearray(largest)) for _ in range(storage.reads_at_once + 1)]
    with ThreadPoolExecutor(storage.reads_at_once) as reader:
        for name in names:
            is_sound = True
            for error in _verify_file(step, name, storage, reader, buffers):
                is_sound = False
                yield error
            if is_sound and name.endswith(SUFFIX):
                yield from _header_problem(step, name, storage)


def _verify_file(
    step: Committed,
    name: str,
    storage: Source,
    reader: ThreadPoolExecutor,
    buffers: list[memoryview],
) -> Iterator[CorruptError]:
    record = step.manifest.files[name]
    ahead: list[tuple[int, memoryview, Future[str | None]]] = []
    with storage.open(step.path / name) as file:
        for number in range(len(record.blocks)):
            data = buffers[number % len(buffers)][: _size(record, number)]
            read = reader.submit(_fill, file, data, number * record.block_bytes)
            ahead.append((number, data, read))
            if len(ahead) == len(buffers):
                yield from _damage(file, step, name, *ahead.pop(0))
        while ahead:
            yield from _damage(file, step, name, *ahead.pop(0))


def verify_quickly(path: PurePath, storage: Source | None = None) -> Iterator[CorruptError]:
    """Check what needs no reading of tensors: COMMIT, manifest, names, sizes, small files and headers.

    Yields and raises as `verify` does.
    """
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    for name in step.manifest.files:
        if name.endswith(SUFFIX):
            yield from _header_problem(step, name, storage)
        else:
            try:
                _check_file(step, name, storage)
            except CorruptError as error:
                yield error


def check_small_files(step: Committed, storage: Source | None = None) -> None:
    """Raise `DamagedBlock` unless all files without tensors are what was committed: configuration, tokenizer."""
    for name in step.manifest.files:
        if not name.endswith(SUFFIX):
            _check_file(step, name, storage or LocalStorage())


def _check_file(step: Committed, name: str, storage: Source) -> None:
    with storage.open(step.path / name) as file:
        for number in range(len(step.manifest.files[name].blocks)):
            read_block(file, step, name, number)


def _header_problem(step: Committed, name: str, storage: Source) -> Iterator[CorruptError]:
    try:
        checked_header(step, name, storage)
    except CorruptError as error:
        yield error


def read_block(file: ReadableFile, step: Committed, name: str, number: int) -> memoryview:
    """A block of a step's file, in memory of its own. Raises as `read_block_into` does."""
    data = memoryview(bytearray(_size(step.manifest.files[name], number)))
    read_block_into(file, step, name, number, [data])
    return data


def read_block_into(
    file: ReadableFile, step: Committed, name: str, number: int, pieces: Iterable[memoryview]
) -> None:
    """Read a block of a step's file to pieces of memory that together have its size, and check it against its hash.

    Raises `DamagedBlock` naming the file and the tensors that lie in the block; the memory then
    holds what was read.
    """
    digest, at = xxhash.xxh3_128(), number * step.manifest.files[name].block_bytes
    ended = None
    for data in pieces:
        for start in range(0, len(data), _HASHED_AT_ONCE):
            some = data[start : start + _HASHED_AT_ONCE]
            ended = ended or _fill(file, some, at)
            digest.update(some)
            at += len(some)
    _check(file, step, name, number, ended or digest.hexdigest())


def checked_header(step: Committed, name: str, storage: Source) -> Header:
    """The header of a step's tensor file, out of blocks that were checked."""
    record, path = step.manifest.files[name], step.path / name
    with storage.open(path) as file:
        data = bytearray(read_block(file, step, name, 0) if record.blocks else b"")
        size = header_size(path, data, record.size)
        for number in range(1, -(-size // record.block_bytes)):
            data += read_block(file, step, name, number)
    return parse_header(path, bytes(data[:size]), record.size)


def _fill(file: ReadableFile, data: memoryview, start: int) -> str | None:
    """Read into all of `data`; says where the file ends before."""
    try:
        file.pread_into(data, start)
    except EOFError as error:
        return str(error)
    return None


def _check(file: ReadableFile, step: Committed, name: str, number: int, found: str) -> None:
    """Raise `DamagedBlock` unless a block has the hash that it was committed with."""
    record = step.manifest.files[name]
    if found != record.blocks[number]:
        start = number * record.block_bytes
        stop = start + _size(record, number)
        holds = _tensors(file, step, name, start, stop)
        raise DamagedBlock(
            step.path / name, start, stop, holds, have=found, want=record.blocks[number]
        )


def _damage(
    file: ReadableFile,
    step: Committed,
    name: str,
    number: int,
    data: memoryview,
    read: Future[str | None],
) -> Iterator[CorruptError]:
    """What is wrong with a block, once it has been read; that the disk could not read it, as well."""
    try:
        ended = read.result()
    except OSError as error:
        ended = str(error)
    try:
        _check(file, step, name, number, ended or block_hash(data))
    except CorruptError as error:
        yield error


def _size(record: FileRecord, number: int) -> int:
    return min(record.block_bytes, record.size - number * record.block_bytes)


def _tensors(
    file: ReadableFile, step: Committed, name: str, start: int, stop: int
) -> tuple[str, ...]:
    """Which tensors lie in a range of a file, as far as its header, of which nothing is known, can tell."""
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
