"""HDFS through hdfs-native, which needs no Java.

Its adapter for fsspec is not used: it cuts names at `?` and `#`, skips directories that cannot be
listed, and closes a file that failed half way as if it were whole. The client must not be used in a
process that was forked after it was made: its threads are gone there, and it hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdfs_native import Client, WriteOptions

from burnish.files.backends import (
    Found,
    Verdict,
    is_unfinished,
    os_verdict,
    pieces_of,
    size_of,
    unfinished,
)
from burnish.files.retry import Pulse
from burnish.files.storage import Bytes

# Give up soon on a name node that does not answer: `Remote` retries. Several attempts, for a standby.
_CONFIG = {
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "500",
    "dfs.client.socket-timeout": "30000",  # of data nodes; `Remote` gives up a name node that hangs
}
_HOPELESS = (
    "QuotaExceededException",
    "IllegalStateException",
    "IllegalArgumentException",
    "InvalidPathException",
    "NotDirectoryException",
    "FileAlreadyExistsException",
)


class HdfsBackend:
    """One name node, or the one in `HADOOP_CONF_DIR` if `host` is "". The user is `HADOOP_USER_NAME` or Kerberos's."""

    faults: tuple[type[Exception], ...] = (OSError, RuntimeError)

    def __init__(self, host: str) -> None:
        self._client: Any = Client(f"hdfs://{host}", _CONFIG) if host else Client(config=_CONFIG)

    def verdict(self, error: Exception) -> Verdict:
        """See `Backend`. The text of an error names the Java exception."""
        text = str(error)
        if "AccessControlException" in text:
            return "denied"
        return "wrong" if any(each in text for each in _HOPELESS) else os_verdict(error)

    def entries(self, path: str, *, deep: bool) -> Iterator[Found]:
        """See `Backend`."""
        with suppress(FileNotFoundError):
            for status in self._client.list_status(path, deep):
                name = status.path.rpartition("/")[2]
                if status.path != path and not is_unfinished(name) and not (deep and status.isdir):
                    yield _found(status)

    def info(self, path: str) -> Found:
        """See `Backend`."""
        status = self._client.get_file_info(path)
        if status.isdir:
            raise FileNotFoundError(path)
        return _found(status)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `Backend`. The client compares the checksums."""
        reader = self._client.read(path)
        count = min(size, len(reader) - offset)
        return bytes(reader.read_range(offset, count)) if count > 0 else b""

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `Backend`. Writes under a temporary name, then renames."""
        folder, _, name = path.rpartition("/")
        temporary, size = f"{folder}/{unfinished(name)}", size_of(source)
        writer = self._client.create(temporary, WriteOptions(create_parent=True))
        try:
            for piece in pieces_of(source):
                writer.write(piece)
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

    def remove(self, path: str) -> None:
        """See `Backend`."""
        with suppress(FileNotFoundError):
            self._client.delete(path, False)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """See `Backend`."""
        with suppress(FileNotFoundError):
            self._client.delete(path, True)


def _found(status: Any) -> Found:
    return Found(status.path, status.length, str(status.modification_time), not status.isdir)
