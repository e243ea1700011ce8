"""The file systems of this machine as a place for remote files: what `file://` names, a mounted share for one.

Files are written under a temporary name, synced and renamed, so that they survive a power loss in the
order in which they were put.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from burnish.files.backend import Found, Verdict, is_unfinished, unfinished, verdict_of
from burnish.files.durable import make_dirs_durably
from burnish.files.patience import Pulse
from burnish.files.storage import Bytes, LocalStorage

_PIECE = 8 << 20


class Mounted:
    """Absolute paths of this machine."""

    faults: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        self._storage = LocalStorage()

    def verdict(self, error: Exception) -> Verdict:
        """By the system's error number."""
        return verdict_of(error) if isinstance(error, OSError) else "transient"

    def files(self, path: str, *, deep: bool) -> Iterator[Found]:
        """Files below, without those that are being written; a link to a file is one, a link to a directory is not followed."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        for folder, folders, names in os.walk(path, onerror=refuse):
            if not deep:
                folders.clear()
            for name in names:
                file = Path(folder, name)
                if not is_unfinished(name) and file.is_file():
                    yield _found(file)

    def names(self, path: str) -> Iterator[str]:
        """Names directly in a directory."""
        for entry in self._storage.entries(Path(path)):
            if not is_unfinished(entry.name):
                yield entry.name

    def info(self, path: str) -> Found:
        """A file, by size and time of its last change."""
        if not Path(path).is_file():
            raise FileNotFoundError(path)
        return _found(Path(path))

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A range of a file."""
        with open(path, "rb") as file:
            return os.pread(file.fileno(), size, offset)

    def put(self, path: str, data: Bytes) -> None:
        """Write under a temporary name, sync, rename."""
        self._write(Path(path), iter([data]), len(memoryview(data).cast("B")), lambda count: None)

    def put_file(self, path: str, source: Path, pulse: Pulse) -> None:
        """The same, in pieces."""
        with source.open("rb") as file:
            pieces = iter(lambda: file.read(_PIECE), b"")
            self._write(Path(path), pieces, source.stat().st_size, pulse)

    def remove(self, path: str) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """Remove a directory with all in it."""
        if Path(path).exists():
            self._storage.remove(Path(path))

    def _write(self, path: Path, pieces: Iterator[Bytes], size: int, pulse: Pulse) -> None:
        make_dirs_durably(self._storage, path.parent, above=2)
        temporary = path.with_name(unfinished(path.name))
        try:
            with self._storage.create(temporary, size) as file:
                offset = 0
                for piece in pieces:
                    file.pwrite(piece, offset)
                    offset += len(piece)
                    pulse(len(piece))
                if offset != size:
                    raise OSError(f"{offset} of {size} bytes were written")
                file.sync()
            self._storage.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._storage.sync_dir(path.parent)


def _found(file: Path) -> Found:
    status = file.stat()
    return Found(str(file), status.st_size, f"{status.st_ino}-{status.st_mtime_ns}")
