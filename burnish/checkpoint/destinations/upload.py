"""Upload a step to a mirror: its files, several at a time, then its manifest, then COMMIT, which makes it exist.

Every file is read back and every block compared with the hash from the training processes' memory; so are files that are there
already. ETags prove less: they are no content hash for multipart or encrypted uploads, and HDFS has none. Only after that may the
local step go. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from burnish.checkpoint.destinations.remote_steps import RemoteSteps
from burnish.checkpoint.manifest import (
    COMMIT,
    COMMIT_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    FileRecord,
    block_hash,
)
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.verify import verify_files
from burnish.errors import BurnishError, CorruptError
from burnish.files.remote import Remote

Moved = Callable[[int], None]
"""Hears of bytes that were sent or read back."""

_FILES_AT_ONCE = 4
_TRIES = 3


def upload(step: Committed, there: RemoteSteps, check: Callable[[], None], moved: Moved) -> None:
    """Put a local committed step on the mirror, and return when all of it was read back.

    `check` is called before anything that makes or unmakes a step. Raises `CorruptError` if the step is damaged here, `BurnishError`
    for faults that stay.
    """
    path = Path(step.path)
    remote = there.remote.below(path.name)
    commit, manifest = (path / COMMIT).read_bytes(), (path / MANIFEST).read_bytes()
    if send_files(step, step.manifest.files, commit, remote, check, moved):
        seal(remote, manifest, commit, check)


def send_files(
    step: Committed,
    names: Iterable[str],
    commit: bytes,
    remote: Remote,
    check: Callable[[], None],
    moved: Moved,
) -> bool:
    """Send these files of a local step to its directory `remote`; return False if its `commit` is there already.

    Compares and keeps what an interrupted upload left; first removes another step of this number and foreign files. Raises as
    `upload` does.
    """
    sizes = {file.name: file.size for file in remote.files()}
    if COMMIT in sizes:
        if remote.read(COMMIT, COMMIT_LIMIT) == commit:
            return False
        check()
        remote.remove(COMMIT)
    for name in sizes.keys() - step.manifest.files.keys() - {COMMIT}:
        remote.remove(name)

    def send(name: str) -> None:
        check()
        _send_file(step, name, remote, sizes.get(name), moved)

    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        sending = [pool.submit(send, name) for name in names]
        try:
            for each in sending:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return True


def seal(remote: Remote, manifest: bytes, commit: bytes, check: Callable[[], None]) -> None:
    """Put the manifest and COMMIT of a step whose files are all in `remote`."""
    _put_checked(remote, MANIFEST, manifest)
    check()
    _put_checked(remote, COMMIT, commit)


def _send_file(step: Committed, name: str, remote: Remote, there: int | None, moved: Moved) -> None:
    """Send a file until it reads back as committed; do nothing if it is there already."""
    record = step.manifest.files[name]
    if there == record.size and is_intact(remote, name, record, moved):
        moved(record.size)
        return
    for _ in range(_TRIES):
        remote.put_file(name, Path(step.path) / name, moved)
        if is_intact(remote, name, record, moved):
            return
    for damage in verify_files(step, [name]):
        raise damage
    raise BurnishError(
        f"{remote.url.below(name)} is not what was sent, {_TRIES} times",
        have="a file of which a block read back has another hash",
        want="the bytes that were committed",
        do="see that the service is in order",
    )


def is_intact(remote: Remote, name: str, record: FileRecord, moved: Moved) -> bool:
    """Whether a file's blocks, read back, have the hashes that they had when they were committed."""
    buffer = memoryview(bytearray(min(record.block_bytes, record.size)))
    for number, wanted in enumerate(record.blocks):
        start = number * record.block_bytes
        block = buffer[: min(record.block_bytes, record.size - start)]
        try:
            remote.read_into(name, block, start)
        except CorruptError:  # it ends before
            return False
        if block_hash(block) != wanted:
            return False
        moved(len(block))
    return True


def _put_checked(remote: Remote, name: str, data: bytes) -> None:
    """Put a small file and read it back."""
    remote.put(name, data)
    if remote.read(name, MANIFEST_LIMIT) != data:
        raise BurnishError(
            f"{remote.url.below(name)} is not what was sent",
            have="other bytes, when it was read back",
            want=f"the {len(data)} bytes that were sent",
            do="see that the service is in order, and that nobody else writes there",
        )
