"""Kinds of remote storage. Files appear whole or not at all. Clients' retries and listing caches are off or small."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from burnish.files.durable import make_dirs_durably, replacing
from burnish.files.storage import LOCAL, Bytes

Pulse = Callable[[int], None]
"""A running transfer calls it with the number of bytes moved since the last call."""
Verdict = Literal["missing", "denied", "wrong", "transient"]
"""Meaning of an error: no such file; no permission; the call can never work; it may work next time."""

_WRONG = frozenset({
    errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOSYS, errno.ENOTEMPTY, errno.EDQUOT,
    errno.ELOOP, errno.EREMCHG,
})  # fmt: skip
_PIECE = 8 << 20
_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_MAX_ATTEMPTS = 2
_UNFINISHED = ".part"
_VERSIONS = ("ETag", "etag", "generation", "created")
_CHANGES = ("LastModified", "mtime", "created")
# Give up soon on a name node that does not answer, because `Remote` retries. Several attempts let a standby answer.
_HDFS_CONFIG = {
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "500",
    "dfs.client.socket-timeout": "30000",  # data nodes; `Remote` abandons a hung name node itself
}
_PERMANENT = (
    "QuotaExceededException",
    "IllegalStateException",
    "IllegalArgumentException",
    "InvalidPathException",
    "NotDirectoryException",
    "FileAlreadyExistsException",
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file; in a `Backend`'s listings also a directory."""

    name: str
    """Its path below the `Remote`'s URL, "" for the URL itself; from a `Backend` its absolute path."""
    size: int = 0
    """Bytes."""
    version: str = ""
    """Differs whenever the content differs: an ETag, or the time of the last change."""
    is_file: bool = True
    modified: float | None = field(default=None, compare=False)
    """The time of the last change in seconds, if the service tells it."""


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(_UNFINISHED)


def _pieces_of(source: Bytes | Path) -> Iterator[Bytes]:
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield from iter(lambda: file.read(_PIECE), b"")
    else:
        view = memoryview(source).cast("B")
        yield from (view[at : at + _PIECE] for at in range(0, len(view), _PIECE))


def _size_of(source: Bytes | Path) -> int:
    return source.stat().st_size if isinstance(source, Path) else memoryview(source).nbytes


def _os_verdict(error: Exception) -> Verdict:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return "missing"
        case PermissionError() | OSError(errno=errno.EROFS):
            return "denied"
        case IsADirectoryError() | FileExistsError():
            return "wrong"
        case OSError(errno=number) if number in _WRONG:
            return "wrong"
    return "transient"


class RemoteSource(Protocol):
    """Files of a service or file system that can be read. The scheme of a URL names the class: `store.py:Store://HOST/PATH`.

    Paths are absolute. Several threads call one object. Inherit from `Backend` for all that fsspec can do.
    """

    faults: tuple[type[Exception], ...]
    """The errors that its calls raise. Any other error is a bug."""

    def __init__(self, host: str) -> None:
        """Connect to the URL's host; "" if it names none."""

    @abstractmethod
    def verdict(self, error: Exception) -> Verdict:
        """Return the meaning of one of `faults`."""

    @abstractmethod
    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        """Yield a directory's entries, or with `deep` all files below; nothing if it does not exist."""

    @abstractmethod
    def info(self, path: str) -> RemoteFile:
        """Return a file. Raises an error with the verdict "missing"."""

    @abstractmethod
    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file, fewer at its end."""


class RemoteDestination(RemoteSource, Protocol):
    """Files that can be written as well, for a mirror or the copy of a step."""

    @abstractmethod
    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """Create or replace a file, which appears whole, in bounded memory if its source is a file."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def remove_below(self, path: str, pulse: Pulse) -> None:
        """Remove a directory tree if it exists."""


class Backend(RemoteDestination):
    """One service or file system; by default through fsspec, which replaces files whole."""

    def __init__(
        self,
        system: Any,
        faults: tuple[type[Exception], ...] = (),
        verdict: Callable[[Exception], Verdict | None] = lambda error: None,
    ) -> None:
        self._system = system
        self._verdict = verdict
        self.faults = (OSError, *faults)

    def verdict(self, error: Exception) -> Verdict:
        """See `RemoteSource.verdict`."""
        return self._verdict(error) or _os_verdict(error)

    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        """See `RemoteSource.entries`."""
        self._system.invalidate_cache()
        if deep:
            listed = self._system.find(path, detail=True).values()
        else:
            try:
                listed = self._system.ls(path, detail=True)
            except FileNotFoundError as error:
                if self.verdict(error) == "denied":
                    raise
                return
        for info in listed:
            name = info["name"]
            # Some services mark a directory by an empty object.
            if name.rstrip("/") != path and not (info["type"] == "file" and name.endswith("/")):
                yield _file_of_info(info)

    def info(self, path: str) -> RemoteFile:
        """See `RemoteSource.info`."""
        self._system.invalidate_cache()
        info = self._system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return _file_of_info(info)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `RemoteSource.read`."""
        options = {"start": offset, "end": offset + size}
        return self._system.cat_file(path, **options)

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `RemoteDestination.write`."""
        from fsspec.callbacks import Callback

        if not isinstance(source, Path):
            self._system.pipe_file(path, bytes(source))
            return
        reported = 0

        def tell(size: int | None, total: int, **_: Any) -> None:
            nonlocal reported
            if total != reported:
                pulse(total - reported)
                reported = total

        # Large files go in parts, several at a time where the service can.
        parts = -(-source.stat().st_size // _PIECE)
        chunk = _PIECE * max(1, -(-parts // _MAX_PARTS))
        callback = Callback(hooks={"pulse": tell})
        self._system.put_file(str(source), path, callback=callback, chunksize=chunk)

    def remove(self, path: str) -> None:
        """See `RemoteDestination.remove`."""
        with suppress(FileNotFoundError, KeyError):  # KeyError: fsspec's memory file system
            self._system.rm_file(path)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """See `RemoteDestination.remove_below`."""
        for name in self._system.find(path):
            if name != path:
                self.remove(name)
                pulse(0)


def _file_of_info(info: dict[str, Any]) -> RemoteFile:
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    if isinstance(version, datetime):  # from fsspec's memory file system
        version = version.timestamp()
    changed = next((info[key] for key in _CHANGES if isinstance(info.get(key), datetime)), None)
    return RemoteFile(
        info["name"].rstrip("/"),
        int(info["size"] or 0),
        str(version).strip('"'),
        info["type"] == "file",
        changed and changed.timestamp(),
    )


class S3Backend(Backend):
    """S3; botocore finds credentials, region and endpoint."""

    def __init__(self, host: str) -> None:
        import aiohttp
        import s3fs
        from botocore import exceptions

        def verdict(error: Exception) -> Verdict | None:
            if isinstance(
                error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
            ):
                return "denied"
            return "wrong" if isinstance(error, exceptions.ParamValidationError) else None

        system = s3fs.S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            max_concurrency=_PARALLEL_PARTS,
            config_kwargs={
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _READ_SECONDS,
                "retries": {"total_max_attempts": _MAX_ATTEMPTS, "mode": "standard"},
            },
        )
        system.retries = _MAX_ATTEMPTS
        faults = (exceptions.BotoCoreError, exceptions.ClientError, aiohttp.ClientError)
        super().__init__(system, faults, verdict)


class GcsBackend(Backend):
    """GCS; google-auth finds credentials, STORAGE_EMULATOR_HOST sets the endpoint."""

    def __init__(self, host: str) -> None:
        import aiohttp

        # The package's own `gcsfs.GCSFileSystem` asks for the bucket's kind before each use.
        from gcsfs.core import GCSFileSystem
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        def verdict(error: Exception) -> Verdict | None:
            if isinstance(error, GoogleAuthError) or str(error).startswith("Forbidden"):
                return "denied"
            if isinstance(error, ValueError):  # a bad request
                return "wrong"
            return (
                _http_verdict(getattr(error, "code", None))
                if isinstance(error, HttpError)
                else None
            )

        # gcsfs logs a traceback for each failure. `Remote` reports a failure once.
        logger = logging.getLogger("gcsfs")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
        system = GCSFileSystem(
            use_listings_cache=False, skip_instance_cache=True, requests_timeout=_READ_SECONDS
        )
        faults = (HttpError, GoogleAuthError, aiohttp.ClientError, ValueError)
        super().__init__(system, faults, verdict)


def _http_verdict(code: object) -> Verdict | None:
    status = int(str(code or 0))
    if status in (401, 403):
        return "denied"
    if status == 404:
        return "missing"
    return "wrong" if 400 <= status < 500 and status not in (408, 429) else None


class MemoryBackend(Backend):
    """This process's memory, for tests."""

    def __init__(self, host: str) -> None:
        from fsspec import filesystem

        super().__init__(filesystem("memory"))

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `RemoteDestination.write`."""
        content = source.read_bytes() if isinstance(source, Path) else source
        if isinstance(source, Path):
            pulse(len(content))
        super().write(path, content, pulse)


class FileBackend(Backend):
    """This machine's file systems, synced: files survive a power loss in the order written."""

    def __init__(self, host: str) -> None:
        super().__init__(None)

    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        """Follow links to files, not to directories."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        for folder, folders, names in os.walk(path, onerror=refuse):
            for name in names:
                file = Path(folder, name)
                if not _is_unfinished(name) and file.is_file():
                    yield _file_of_path(file)
            if not deep:
                yield from (
                    RemoteFile(os.path.join(folder, name), is_file=False) for name in folders
                )
                return

    def info(self, path: str) -> RemoteFile:
        """See `RemoteSource.info`."""
        if not Path(path).is_file():
            raise FileNotFoundError(path)
        return _file_of_path(Path(path))

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `RemoteSource.read`."""
        with open(path, "rb") as file:
            return os.pread(file.fileno(), size, offset)

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `RemoteDestination.write`."""
        target = Path(path)
        size = _size_of(source)
        offset = 0
        make_dirs_durably(LOCAL, target.parent, above=2)
        with replacing(LOCAL, target, size, _UNFINISHED) as file:
            for piece in _pieces_of(source):
                file.pwrite(piece, offset)
                offset += len(piece)
                pulse(len(piece))
            if offset != size:
                raise OSError(f"{offset} of {size} bytes were written")

    def remove(self, path: str) -> None:
        """See `RemoteDestination.remove`."""
        Path(path).unlink(missing_ok=True)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """See `RemoteDestination.remove_below`."""
        if Path(path).exists():
            LOCAL.remove(Path(path))


def _file_of_path(file: Path) -> RemoteFile:
    status = file.stat()
    version = f"{status.st_ino}-{status.st_mtime_ns}"
    return RemoteFile(str(file), status.st_size, version, modified=status.st_mtime)


class HdfsBackend(Backend):
    """HDFS through hdfs-native, which needs no Java.

    Its fsspec adapter cuts names at `?` and `#`, skips directories that cannot be listed, and closes half-written files. The
    client hangs in a process forked after it was made.
    """

    def __init__(self, host: str) -> None:
        from hdfs_native import Client, WriteOptions

        super().__init__(None, (RuntimeError,), _hdfs_verdict)
        self._client = (
            Client(f"hdfs://{host}", _HDFS_CONFIG) if host else Client(config=_HDFS_CONFIG)
        )
        self._write_options = WriteOptions(create_parent=True)

    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        """See `RemoteSource.entries`."""
        with suppress(FileNotFoundError):
            for status in self._client.list_status(path, deep):
                name = status.path.rpartition("/")[2]
                if status.path != path and not _is_unfinished(name) and not (deep and status.isdir):
                    yield _file_of_status(status)

    def info(self, path: str) -> RemoteFile:
        """See `RemoteSource.info`."""
        status = self._client.get_file_info(path)
        if status.isdir:
            raise FileNotFoundError(path)
        return _file_of_status(status)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `RemoteSource.read`."""
        reader = self._client.read(path)
        count = min(size, len(reader) - offset)
        return bytes(reader.read_range(offset, count)) if count > 0 else b""

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `RemoteDestination.write`."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}{_UNFINISHED}"
        size = _size_of(source)
        writer = self._client.create(temporary, self._write_options)
        try:
            for piece in _pieces_of(source):
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
        """See `RemoteDestination.remove`."""
        with suppress(FileNotFoundError):
            self._client.delete(path, False)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """See `RemoteDestination.remove_below`."""
        with suppress(FileNotFoundError):
            self._client.delete(path, True)


def _hdfs_verdict(error: Exception) -> Verdict | None:
    text = str(error)  # names the Java exception
    if "AccessControlException" in text:
        return "denied"
    return "wrong" if any(each in text for each in _PERMANENT) else None


def _file_of_status(status: Any) -> RemoteFile:
    changed = status.modification_time
    return RemoteFile(
        status.path, status.length, str(changed), not status.isdir, modified=changed / 1000
    )
