"""HDFS by way of hdfs-native, which needs no Java.

Its client is used and not its adapter for fsspec: that one cuts names at `?` and `#`, passes over
directories that cannot be listed, and closes a file that failed half way as if it were whole. A file
is written under a temporary name and renamed. The client must not be used in a process that was
forked after it was made (its threads are gone there, and it hangs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdfs_native import Client, WriteOptions

from burnish.files.backend import Found, Verdict, is_unfinished, unfinished, verdict_of
from burnish.files.patience import Pulse
from burnish.files.storage import Bytes

_PIECE = 8 << 20
# A name node that does not answer is given up soon: what has the patience is outside. Several tries, for a standby.
_CONFIG = {
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "500",
    "dfs.client.socket-timeout": "30000",  # of data nodes; a name node that hangs is left to Patience
}

_HOPELESS = (
    "QuotaExceededException",
    "IllegalStateException",
    "IllegalArgumentException",
    "InvalidPathException",
    "NotDirectoryException",
    "FileAlreadyExistsException",
)


class Hdfs:
    """One name node, or the one that `HADOOP_CONF_DIR` names where `host` is ""; the user is `HADOOP_USER_NAME` or Kerberos's."""

    faults: tuple[type[Exception], ...] = (OSError, RuntimeError)

    def __init__(self, host: str) -> None:
        self._client: Any = Client(f"hdfs://{host}", _CONFIG) if host else Client(config=_CONFIG)

    def verdict(self, error: Exception) -> Verdict:
        """The library's errors carry the name of the Java exception in their text."""
        text = str(error)
        if "AccessControlException" in text:
            return "denied"
        if any(each in text for each in _HOPELESS):
            return "wrong"
        return verdict_of(error) if isinstance(error, OSError) else "transient"

    def files(self, path: str, *, deep: bool) -> Iterator[Found]:
        """Files below, without those that are being written."""
        with suppress(FileNotFoundError):
            for status in self._client.list_status(path, deep):
                name = status.path.rpartition("/")[2]
                if not status.isdir and not is_unfinished(name) and status.path != path:
                    yield _found(status)

    def names(self, path: str) -> Iterator[str]:
        """Names directly in a directory."""
        with suppress(FileNotFoundError):
            for status in self._client.list_status(path, False):
                name = status.path.rpartition("/")[2]
                if status.path != path and not is_unfinished(name):
                    yield name

    def info(self, path: str) -> Found:
        """A file, by size and time of its last change."""
        status = self._client.get_file_info(path)
        if status.isdir:
            raise FileNotFoundError(path)
        return _found(status)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A range of a file; its checksums are checked by the client."""
        reader = self._client.read(path)
        count = min(size, len(reader) - offset)
        return bytes(reader.read_range(offset, count)) if count > 0 else b""

    def put(self, path: str, data: Bytes) -> None:
        """Write under a temporary name, then rename."""
        view = memoryview(data).cast("B")
        self._write(path, (view[at : at + _PIECE] for at in range(0, len(view), _PIECE)), len(view))

    def put_file(self, path: str, source: Path, pulse: Pulse) -> None:
        """The same, in pieces; one writer, as HDFS has it."""
        with source.open("rb") as file:
            pieces = iter(lambda: file.read(_PIECE), b"")
            self._write(path, pieces, source.stat().st_size, pulse)

    def remove(self, path: str) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            self._client.delete(path, False)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """Remove a directory with all in it."""
        with suppress(FileNotFoundError):
            self._client.delete(path, True)

    def _write(
        self, path: str, pieces: Iterator[Bytes], size: int, pulse: Pulse | None = None
    ) -> None:
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/{unfinished(name)}"
        writer = self._client.create(temporary, WriteOptions(create_parent=True))
        try:
            for piece in pieces:
                writer.write(piece)
                if pulse is not None:
                    pulse(len(piece))
            writer.close()
            written = self._client.get_file_info(temporary).length
            if written != size:
                raise OSError(f"{written} of {size} bytes were written")
            self._client.rename(temporary, path, True)
        except BaseException:
            with suppress(*self.faults):
                self._client.delete(temporary, False)
            raise


def _found(status: Any) -> Found:
    return Found(status.path, status.length, str(status.modification_time))
