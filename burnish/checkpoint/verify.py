"""Whether the bytes on disk are those that were committed: every block against its hash.

Without torch, in one block of memory. Readers of tensors use the same check on the blocks they
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from burnish.checkpoint.committed import Committed, open_step
from burnish.checkpoint.manifest import FileRecord, block_hash
from burnish.errors import CorruptError
from burnish.files.safetensors import Header, read_header
from burnish.files.storage import File, LocalStorage, Storage


def verify(path: Path, storage: Storage | None = None) -> Iterator[CorruptError]:
    """Read all of the step at `path`; yields an error per damaged block, naming file and tensors.

    Raises `CorruptError` when COMMIT, manifest, state or the list of files is not in order.
    """
    storage = storage or LocalStorage()
    step = open_step(path, storage)
    for name, record in step.manifest.files.items():
        with storage.open(path / name) as file:
            for number in range(len(record.blocks)):
                try:
                    read_block(file, step, name, number)
                except CorruptError as error:
                    yield error


def read_block(
    file: File, step: Committed, name: str, number: int, into: memoryview | None = None
) -> memoryview:
    """A block of a step's file, checked against its hash, in `into` or memory of its own.

    Raises `CorruptError` naming the file and the tensors that lie in the block.
    """
    record = step.manifest.files[name]
    start = number * record.block_bytes
    size = min(record.block_bytes, record.size - start)
    data = memoryview(bytearray(size)) if into is None else into[:size]
    try:
        file.pread_into(data, start)
        found = block_hash(data)
    except EOFError as error:
        found = str(error)
    if found != record.blocks[number]:
        raise CorruptError(
            f"{step.path / name} is damaged: bytes {start} to {start + size} are not those that were written",
            have=f"{found}; they hold {_tensors(step, name, start, start + size)}",
            want=record.blocks[number],
            do="use another checkpoint, and check the disk",
        )
    return data


def checked_header(step: Committed, name: str, storage: Storage) -> Header:
    """The header of a step's tensor file, from blocks that are checked first."""
    record = step.manifest.files[name]
    with storage.open(step.path / name) as file:
        first = read_block(file, step, name, 0)
        size = 8 + int.from_bytes(first[:8], "little")
        for number in range(1, _blocks(size, record)):
            read_block(file, step, name, number)
    return read_header(step.path / name)


def _blocks(size: int, record: FileRecord) -> int:
    return min(-(-size // record.block_bytes), len(record.blocks))


def _tensors(step: Committed, name: str, start: int, stop: int) -> str:
    """Which tensors lie in a range of a file, for a message."""
    if not name.endswith(".safetensors"):
        return "no tensor"
    try:
        header = read_header(step.path / name)
    except CorruptError:
        return "the header"
    names = [e.name for e in header.entries.values() if e.begin < stop and start < e.end]
    names = ["the header"] * (start < header.size) + names
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
