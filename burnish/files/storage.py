"""The few file operations that durability rests on. Tests use subclasses that fail, fill up or forget unsynced writes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, Protocol, Self


class Closing(Protocol):
    """A context manager that calls `close`."""

    def close(self) -> None:
        """Release the resource."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Bytes = bytes | bytearray | memoryview
"""Data that can be written: bytes in memory."""


Kind = Literal["file", "directory", "other"]
"""Type of a directory's entry. Links and devices are "other"; links are never followed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a directory."""

    name: str
    """Its last path component."""
    kind: Kind
    size: int
    """Size of a file in bytes; 0 for any other kind."""


class ReadableFile(Closing, Protocol):
    """An open file, read at offsets in bytes."""

    def size(self) -> int:
        """Return its size in bytes."""

    def pread_into(self, buffer: bytearray | memoryview, offset: int) -> None:
        """Fill the buffer from `offset`. Raises `EOFError` if the file is too short."""


class Source(Protocol):
    """A readable directory tree. Methods raise `OSError`."""

    reads_at_once: int
    """How many reads to make in parallel; 1 where parallel reads are not faster."""

    def open(self, path: PurePath) -> ReadableFile:
        """Open a regular file; refuse a link or a device."""

    def entries(self, path: PurePath) -> list[Entry]:
        """Return a directory's entries, sorted; [] if absent."""

    def kind(self, path: PurePath) -> Kind | None:
        """Return a path's kind; None if absent."""


class LocalFile(Closing):
    """A file of this machine, by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size(self) -> int:
        """Return its size."""
        return os.fstat(self._descriptor).st_size

    def pread_into(self, buffer: bytearray | memoryview, offset: int) -> None:
        """Fill the buffer, in as many reads as needed."""
        unread = memoryview(buffer).cast("B")
        while unread:
            count = os.preadv(self._descriptor, [unread], offset)
            if count == 0:
                raise EOFError(f"the file ends {len(unread)} bytes too early, at byte {offset}")
            unread = unread[count:]
            offset = offset + count

    def pwrite(self, data: Bytes, offset: int) -> None:
        """Write all data, in as many writes as needed."""
        unwritten = memoryview(data).cast("B")
        while unwritten:
            count = os.pwrite(self._descriptor, unwritten, offset)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            unwritten = unwritten[count:]
            offset = offset + count

    def sync(self) -> None:
        """Flush data and length to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class LocalStorage:
    """This machine's file systems, network mounts included."""

    reads_at_once = 1

    def create(self, path: Path, size: int) -> LocalFile:
        """Create a file of this length; fail at once without room."""
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o644)
        try:
            if size:
                allocate(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, error.strerror, str(path)) from error
        return LocalFile(descriptor)

    def open(self, path: PurePath, *, write: bool = False) -> LocalFile:
        """Open a regular file."""
        access = os.O_RDWR if write else os.O_RDONLY
        return LocalFile(_open_regular(path, access | os.O_NOFOLLOW))

    def make_dirs(self, path: Path) -> None:
        """Run `mkdir -p`."""
        path.mkdir(parents=True, exist_ok=True)

    def sync_dir(self, path: Path) -> None:
        """Flush a directory's names to the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Call `rename(2)`."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Run `rm -r`; follow no links."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def entries(self, path: PurePath) -> list[Entry]:
        """Return the directory's entries, sorted; [] if absent."""
        try:
            with os.scandir(path) as items:
                return sorted(map(_entry, items), key=lambda entry: entry.name)
        except FileNotFoundError:
            return []

    def kind(self, path: PurePath) -> Kind | None:
        """Return the kind from `lstat(2)`."""
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISDIR(mode):
            return "directory"
        return "file" if stat.S_ISREG(mode) else "other"

    def free_bytes(self, path: Path) -> int:
        """Return the bytes free to this user."""
        statistics = os.statvfs(path)
        return statistics.f_bavail * statistics.f_frsize


LOCAL = LocalStorage()
"""This machine's storage. It has no state."""


def open_regular(path: PurePath) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises `OSError` for a pipe, a socket, a device or a directory, and never waits."""
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def _open_regular(path: PurePath, access: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _entry(item: os.DirEntry[str]) -> Entry:
    if item.is_dir(follow_symlinks=False):
        return Entry(item.name, "directory", 0)
    if item.is_file(follow_symlinks=False):
        return Entry(item.name, "file", item.stat(follow_symlinks=False).st_size)
    return Entry(item.name, "other", 0)


def allocate(descriptor: int, size: int) -> None:
    """Reserve the space, or only set the length if the file system cannot."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(descriptor, size)
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)
