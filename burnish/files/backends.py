"""Kinds of remote storage. Each lists files, reads ranges, and writes files that appear whole or not at all.

S3, Google Cloud Storage, the Hugging Face Hub and fsspec's memory share one adapter of fsspec. `file://`
writes through `LocalStorage`, which syncs. HDFS is in `burnish.files.hdfs`. `Remote` (burnish.files.remote)
adds retries and errors for people; the clients' own retries and listing caches are off or small.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from fsspec.callbacks import Callback

from burnish.files.durable import make_dirs_durably
from burnish.files.retry import Pulse
from burnish.files.storage import Bytes, LocalStorage

Verdict = Literal["missing", "denied", "wrong", "transient"]
"""What an error means: no such file; no permission; it can never work; it may work next time."""

_BY_ERRNO: dict[int, Verdict] = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
}
_WRONG = frozenset({
    errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOSYS,
    errno.ENOTEMPTY, errno.EDQUOT, errno.ELOOP, errno.EREMCHG,
})  # fmt: skip
_BY_KIND: tuple[tuple[type[OSError], Verdict], ...] = (
    (FileNotFoundError, "missing"),
    (NotADirectoryError, "missing"),
    (PermissionError, "denied"),
    (IsADirectoryError, "wrong"),
    (FileExistsError, "wrong"),
)
_PIECE = 8 << 20
_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_MAX_ATTEMPTS = 2
_UNFINISHED = ".part"
_VERSIONS = ("ETag", "etag", "generation", "created", "blob_id", "xet_hash", "mtime")


@dataclass(frozen=True, slots=True)
class Found:
    """A file or directory of a listing."""

    path: str
    size: int = 0
    """Bytes."""
    version: str = ""
    """Differs whenever the content differs: an ETag, or the time of the last change."""
    is_file: bool = True


class Backend(Protocol):
    """One service or file system. Paths are absolute, in the service's form, without a slash at the end."""

    faults: tuple[type[Exception], ...]
    """The errors that its calls raise. Any other error is a bug."""

    def verdict(self, error: Exception) -> Verdict:
        """Return what one of `faults` means."""

    def entries(self, path: str, *, deep: bool) -> Iterator[Found]:
        """Yield the entries of a directory, or with `deep` all files below it; nothing if it does not exist."""

    def info(self, path: str) -> Found:
        """Return a file. Raises an error with the verdict "missing" if there is none."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file, fewer at its end."""

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """Create or replace a file with these bytes, or with a local file in bounded memory."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """Remove a directory and everything in it if it exists."""


def unfinished(name: str) -> str:
    """Return a new hidden name for a file while it is written."""
    return f".{name}.{uuid.uuid4().hex}{_UNFINISHED}"


def is_unfinished(name: str) -> bool:
    """Return whether `unfinished` made this name. Listings leave such files out."""
    return name.startswith(".") and name.endswith(_UNFINISHED)


def pieces_of(source: Bytes | Path) -> Iterator[Bytes]:
    """Yield bytes, or the content of a local file, in pieces of 8 MiB."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield from iter(lambda: file.read(_PIECE), b"")
    else:
        view = memoryview(source).cast("B")
        yield from (view[at : at + _PIECE] for at in range(0, len(view), _PIECE))


def size_of(source: Bytes | Path) -> int:
    """Return the number of bytes of a source."""
    return source.stat().st_size if isinstance(source, Path) else memoryview(source).nbytes


def os_verdict(error: Exception) -> Verdict:
    """Return the verdict for the system's errors and those made like them."""
    if not isinstance(error, OSError):
        return "transient"
    for kind, verdict in _BY_KIND:
        if isinstance(error, kind):
            return verdict
    if error.errno in _WRONG:
        return "wrong"
    return _BY_ERRNO.get(error.errno or 0, "transient")


class FsspecBackend:
    """Storage behind an fsspec file system. It replaces files whole, so nothing is renamed."""

    def __init__(
        self,
        system: Any,
        faults: tuple[type[Exception], ...] = (),
        verdict: Callable[[Exception], Verdict | None] = lambda error: None,
        **read_options: Any,
    ) -> None:
        self._system = system
        self._verdict = verdict
        self._read_options = read_options
        self.faults = (OSError, *faults)

    def verdict(self, error: Exception) -> Verdict:
        """See `Backend`."""
        return self._verdict(error) or os_verdict(error)

    def entries(self, path: str, *, deep: bool) -> Iterator[Found]:
        """See `Backend`. Empty objects that stand for directories are left out."""
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
            if name.rstrip("/") != path and not (info["type"] == "file" and name.endswith("/")):
                yield _found(info)

    def info(self, path: str) -> Found:
        """See `Backend`."""
        self._system.invalidate_cache()
        info = self._system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return _found(info)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `Backend`."""
        data: bytes = self._system.cat_file(
            path, start=offset, end=offset + size, **self._read_options
        )
        return data

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `Backend`. Large files go in parts, several at a time where the service can."""
        if not isinstance(source, Path):
            self._system.pipe_file(path, bytes(source))
            return
        parts = -(-source.stat().st_size // _PIECE)
        chunk = _PIECE * max(1, -(-parts // _MAX_PARTS))
        self._system.put_file(str(source), path, callback=_Pulsing(pulse), chunksize=chunk)

    def remove(self, path: str) -> None:
        """See `Backend`."""
        try:
            self._system.rm_file(path)
        except (FileNotFoundError, KeyError):  # fsspec's memory raises the latter
            return

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """See `Backend`."""
        for name in self._system.find(path):
            if name != path:
                self.remove(name)
                pulse(0)


def _found(info: dict[str, Any]) -> Found:
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    if isinstance(version, datetime):  # fsspec's memory returns either
        version = version.timestamp()
    is_file = info["type"] == "file"
    return Found(info["name"].rstrip("/"), int(info["size"] or 0), str(version).strip('"'), is_file)


class _Pulsing(Callback):  # type: ignore[misc]
    """Passes fsspec's progress, a running total of bytes, on to a `Pulse`."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse
        self._told = 0

    def call(self, hook_name: str | None = None, **_: Any) -> None:
        """Called by fsspec when its total changes."""
        if self.value != self._told:
            self._pulse(self.value - self._told)
            self._told = self.value


def open_s3() -> FsspecBackend:
    """Connect to S3 or a service like it. botocore finds credentials, region and endpoint."""
    import aiohttp
    import s3fs
    from botocore import exceptions

    def verdict(error: Exception) -> Verdict | None:
        if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
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
    return FsspecBackend(system, faults, verdict)


def open_gs() -> FsspecBackend:
    """Connect to Google Cloud Storage. google-auth finds credentials; STORAGE_EMULATOR_HOST names another endpoint."""
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
        return _http_verdict(getattr(error, "code", None)) if isinstance(error, HttpError) else None

    system = GCSFileSystem(
        use_listings_cache=False, skip_instance_cache=True, requests_timeout=_READ_SECONDS
    )
    faults = (HttpError, GoogleAuthError, aiohttp.ClientError, ValueError)
    return FsspecBackend(system, faults, verdict)


def open_hf() -> FsspecBackend:
    """Connect to the Hugging Face Hub. HF_TOKEN or a login gives credentials, HF_ENDPOINT another address."""
    from huggingface_hub import HfFileSystem, errors

    def verdict(error: Exception) -> Verdict | None:
        if isinstance(error, (ValueError, NotImplementedError)):  # no name of a repository
            return "wrong"
        # The hub answers 401 for a repository that does not exist as for one that is private.
        cause = error.__cause__ or error
        return _http_verdict(getattr(getattr(cause, "response", None), "status_code", None))

    transport = errors.HfHubHTTPError.__mro__[1]  # of the HTTP client that the package uses
    faults = (transport, ValueError, NotImplementedError)
    # By default a read fetches 5 MiB more than it is asked for.
    system = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))
    return FsspecBackend(system, faults, verdict, cache_type="none")


def _http_verdict(code: object) -> Verdict | None:
    """Return the verdict for an HTTP status; None if another try may help."""
    status = int(str(code or 0))
    if status in (401, 403):
        return "denied"
    if status == 404:
        return "missing"
    return "wrong" if 400 <= status < 500 and status not in (408, 429) else None


class _Memory(FsspecBackend):
    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `Backend`. Here, too, an object appears whole."""
        content = source.read_bytes() if isinstance(source, Path) else source
        if isinstance(source, Path):
            pulse(len(content))
        super().write(path, content, pulse)


def open_memory() -> FsspecBackend:
    """Use this process's memory; all objects share one store."""
    import fsspec

    return _Memory(fsspec.filesystem("memory"))


class LocalBackend:
    """This machine's file systems. Files are synced and renamed, so they survive a power loss in the order written."""

    faults: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        self._storage = LocalStorage()

    def verdict(self, error: Exception) -> Verdict:
        """See `Backend`."""
        return os_verdict(error)

    def entries(self, path: str, *, deep: bool) -> Iterator[Found]:
        """See `Backend`. Links to files are followed, links to directories are not."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        for folder, folders, names in os.walk(path, onerror=refuse):
            for name in names:
                file = Path(folder, name)
                if not is_unfinished(name) and file.is_file():
                    yield _found_here(file)
            if not deep:
                yield from (Found(os.path.join(folder, name), is_file=False) for name in folders)
                return

    def info(self, path: str) -> Found:
        """See `Backend`."""
        if not Path(path).is_file():
            raise FileNotFoundError(path)
        return _found_here(Path(path))

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `Backend`."""
        with open(path, "rb") as file:
            return os.pread(file.fileno(), size, offset)

    def write(self, path: str, source: Bytes | Path, pulse: Pulse) -> None:
        """See `Backend`."""
        target, size, offset = Path(path), size_of(source), 0
        make_dirs_durably(self._storage, target.parent, above=2)
        temporary = target.with_name(unfinished(target.name))
        try:
            with self._storage.create(temporary, size) as file:
                for piece in pieces_of(source):
                    file.pwrite(piece, offset)
                    offset += len(piece)
                    pulse(len(piece))
                if offset != size:
                    raise OSError(f"{offset} of {size} bytes were written")
                file.sync()
            self._storage.rename(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._storage.sync_dir(target.parent)

    def remove(self, path: str) -> None:
        """See `Backend`."""
        Path(path).unlink(missing_ok=True)

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """See `Backend`."""
        if Path(path).exists():
            self._storage.remove(Path(path))


def _found_here(file: Path) -> Found:
    status = file.stat()
    return Found(str(file), status.st_size, f"{status.st_ino}-{status.st_mtime_ns}")
