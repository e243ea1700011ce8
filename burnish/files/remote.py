"""Files behind a URL: listed, read in ranges, written whole, removed; faults that pass are waited out.

One class for `hdfs://`, `s3://`, `gs://`, `file://` and `memory://`. Every call is tried again with
growing pauses while its fault may pass, never for what is not there or not allowed, and none takes
for ever (`Patience`). Errors name the URL and never a credential. Its methods may be called from
several threads at once.

A `Remote` may be pickled; it opens its connection where it is first used. It must not be used in a
process forked after that. Left out: copies on this machine (`burnish.files.cached`).
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from burnish.errors import BurnishError, CorruptError, MissingError, UsageError, install
from burnish.files.backend import Backend, Found, Verdict
from burnish.files.patience import LeftBehind, Patience, Pulse, persist
from burnish.files.storage import Bytes
from burnish.files.urls import SCHEMES, Url, redacted

T = TypeVar("T")

log = logging.getLogger("burnish")

_CHANGES = ("written", "removed")
# What is done by calls that change something.
_REASON = 300
_TELL_AFTER = 3


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that is there."""

    name: str
    """Its path below the `Remote`'s URL; "" for the URL itself."""
    size: int
    """Bytes."""
    version: str
    """Another text whenever the content is another: an ETag, or the time of its last change."""


class Remote:
    """What lies at and below a URL. Names are paths below it, divided by `/`; "" is the URL itself."""

    def __init__(self, url: str | Url, patience: Patience | None = None) -> None:
        """Takes the URL apart, and connects to nothing yet. Raises `UsageError` for one that cannot be."""
        self.url = Url.parse(url) if isinstance(url, str) else url
        self.patience = patience or Patience()
        self._connection = _Connection(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        """The URL without the connection."""
        return (type(self), (self.url, self.patience))

    def __str__(self) -> str:
        return str(self.url)

    @property
    def may_change_late(self) -> bool:
        """Whether a write or a removal hung and was given up: it may still come to pass, until this process ends."""
        return self._connection.may_change_late

    def connect(self) -> None:
        """Load what this kind of URL needs. Raises `MissingError` with the command that installs it."""
        self._connection.backend()

    def files(self, below: str = "", *, deep: bool = True) -> list[RemoteFile]:
        """The files of a directory, and if `deep` those further below it, by name; [] where there is no such directory.

        Their names are paths below the URL, not below `below`.
        """
        folder, root = self._path(below), self._path("")

        def look(backend: Backend, pulse: Pulse) -> list[Found]:
            return list(backend.files(folder, deep=deep))

        found = self._persist(below, "listed", look)
        return sorted((self._file(each, root) for each in found), key=lambda file: file.name)

    def names(self, below: str = "") -> list[str]:
        """The names of files and directories directly in a directory, sorted; [] where there is none."""
        folder = self._path(below)
        found = self._persist(below, "listed", lambda backend, pulse: set(backend.names(folder)))
        return sorted(found)

    def stat(self, name: str = "") -> RemoteFile | None:
        """A file's size and version; None where there is none."""
        path = self._path(name)
        try:
            found = self._persist(name, "looked at", lambda backend, pulse: backend.info(path))
        except MissingError:
            return None
        return RemoteFile(name, found.size, found.version)

    def read_into(self, name: str, buffer: bytearray | memoryview, offset: int = 0) -> None:
        """Fill the whole buffer from a file's byte `offset`.

        Raises `MissingError` where there is no such file, `CorruptError` where it ends before.
        """
        view, path = memoryview(buffer).cast("B"), self._path(name)
        if not view:
            return

        def read(backend: Backend, pulse: Pulse) -> bytes:
            try:
                data = backend.read(path, offset, len(view))
            except backend.faults as error:
                if backend.verdict(error) != "wrong":
                    raise
                data = b""  # how some services refuse a range behind the end
            if len(data) < len(view) <= backend.info(path).size - offset:
                raise ConnectionError(f"{len(data)} of {len(view)} bytes came")
            return data

        data = self._persist(name, "read", read)
        if len(data) != len(view):
            raise CorruptError(
                f"{self.url.below(name)} is shorter than it should be",
                want=f"{len(view)} bytes from byte {offset}",
                do="see that nobody writes there; where it is a copy, copy it again",
            )
        view[:] = data

    def read(self, name: str, limit: int) -> bytes:
        """A small file's content. Raises `MissingError`, and `CorruptError` for more than `limit` bytes."""
        found = self.stat(name)
        if found is None:
            raise self._missing(name)
        if found.size > limit:
            raise CorruptError(
                f"{self.url.below(name)} is too long",
                have=f"{found.size} bytes",
                want=f"at most {limit}",
                do="put the file there that belongs there",
            )
        content = bytearray(found.size)
        self.read_into(name, content)
        return bytes(content)

    def put(self, name: str, data: Bytes) -> None:
        """Make or replace a file, which appears whole; directories above it are made."""
        path = self._path(name)
        self._persist(name, "written", lambda backend, pulse: backend.put(path, data))

    def put_file(
        self, name: str, source: Path, advance: Callable[[int], None] | None = None
    ) -> None:
        """Make or replace a file, which appears whole, with the content of one on this machine.

        Sent in parts, several at a time where the service can, in at most 64 MiB of memory.
        `advance` hears, in another thread, of bytes that were sent, more than once of those that had
        to be sent again. Raises `BurnishError`, and `OSError` for a source that cannot be read.
        """
        path = self._path(name)
        source.stat()  # raises here, where no service has to do with it

        def send(backend: Backend, pulse: Pulse) -> None:
            def moved(count: int) -> None:
                pulse(count)
                if advance is not None:
                    advance(count)

            size = source.stat().st_size  # it may have grown since the last attempt
            backend.put_file(path, source, moved)
            sent = backend.info(path).size
            if sent != size:
                raise ConnectionError(f"{sent} of {size} bytes arrived")

        self._persist(name, "written", send)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens where there is none."""
        path = self._path(name)
        self._persist(name, "removed", lambda backend, pulse: backend.remove(path))

    def remove_below(self, name: str) -> None:
        """Remove a directory with all in it, in any order; nothing happens where there is none."""
        path = self._path(name)
        self._persist(name, "removed", lambda backend, pulse: backend.remove_below(path, pulse))

    def below(self, name: str) -> Remote:
        """What lies at and below a name, over the same connection."""
        return self._sharing(self.url.below(name))

    def parent(self) -> Remote:
        """The directory that the URL lies in, over the same connection."""
        return self._sharing(self.url.parent)

    def _sharing(self, url: Url) -> Remote:
        remote = Remote(url, self.patience)
        remote._connection = self._connection
        return remote

    def _path(self, name: str) -> str:
        if any(part in (".", "..") for part in name.split("/")):
            raise UsageError(
                f"{name!r} is no name below {self.url}",
                want="one without . and ..",
                do="write the path out",
            )
        url = self.url.below(name)
        return (
            f"{url.host}/{url.path}".rstrip("/") if url.scheme in ("s3", "gs") else f"/{url.path}"
        )

    def _file(self, found: Found, root: str) -> RemoteFile:
        name = found.path.removeprefix(root).strip("/")
        return RemoteFile(name, found.size, found.version)

    def _persist(self, name: str, done: str, call: Callable[[Backend, Pulse], T]) -> T:
        backend = self._connection.backend()
        faults: tuple[type[Exception], ...] = (*backend.faults, TimeoutError)

        def note(error: Exception) -> None:
            if isinstance(error, LeftBehind) and done in _CHANGES:
                self._connection.may_change_late = True

        def again(error: Exception, tries: int) -> bool:
            note(error)
            transient = isinstance(error, faults) and backend.verdict(error) == "transient"
            if transient and tries == _TELL_AFTER:
                url, reason = self.url.below(name), _reason(error)
                log.warning("%s could not be %s so far (%s); trying on", url, done, reason)
            return transient

        try:
            return persist(lambda pulse: call(backend, pulse), again, self.patience)
        except faults as error:
            note(error)
            verdict = backend.verdict(error)
            if verdict == "missing" and done != "written":
                raise self._missing(name) from error
            raise _explained(self.url.below(name), done, verdict, error) from error

    def _missing(self, name: str) -> MissingError:
        return MissingError(
            f"there is no {self.url.below(name)}", do="correct the URL, or put it there"
        )


class _Connection:
    """The backend of a service: opened when it is first used, and used by one process only."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._opened: tuple[int, Backend] | None = None
        self.may_change_late = False
        """See `Remote.may_change_late`."""

    def backend(self) -> Backend:
        """Open it, or take what is open. Raises `MissingError` for what is not installed."""
        with self._lock:
            if self._opened is None:
                self._opened = (os.getpid(), _open(self._url))
            pid, backend = self._opened
        if pid != os.getpid():
            raise RuntimeError(f"{self._url} was opened before this process was forked")
        return backend


def _open(url: Url) -> Backend:
    module, name, extra = _BACKENDS[url.scheme]
    try:
        opener = getattr(importlib.import_module(f"burnish.files.{module}"), name)
        backend: Backend = opener(url.host) if url.scheme == "hdfs" else opener()
    except ModuleNotFoundError as error:
        raise MissingError(
            f"{url.scheme}:// needs a package that is not installed",
            have=f"no module {error.name}",
            do=install(extra),
        ) from error
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # hdfs-native looks the name up in its configuration
        raise UsageError(
            f"{url} cannot be opened",
            have=_reason(error),
            want=SCHEMES[url.scheme],
            do="correct the URL, or the files that HADOOP_CONF_DIR names",
        ) from error
    return backend


_BACKENDS = {
    "s3": ("object_store", "open_s3", "s3"),
    "gs": ("object_store", "open_gs", "gcs"),
    "memory": ("object_store", "open_memory", ""),
    "hdfs": ("hdfs", "Hdfs", "hdfs"),
    "file": ("mounted", "Mounted", ""),
}


def _reason(error: Exception) -> str:
    text = (
        str(error).replace("\\n", "\n").replace("\\t", "\t").partition("\n\tat ")[0]
    )  # no Java trace
    return redacted(" ".join(f"{type(error).__name__}: {text}".split()))[:_REASON]


def _explained(url: Url, done: str, verdict: Verdict, error: Exception) -> BurnishError:
    have = _reason(error)
    if verdict == "denied":
        return UsageError(
            f"{url} may not be {done} with the credentials that there are",
            have=have,
            do=_CREDENTIALS.get(url.scheme, "see who may use it"),
        )
    if verdict in ("wrong", "missing"):
        return BurnishError(
            f"{url} cannot be {done}", have=have, do="see that the URL and the service are right"
        )
    return BurnishError(
        f"{url} could not be {done}, again and again",
        have=have,
        do="see that the service is up and can be reached from here, then start again",
    )


_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for one who may",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS for one who may",
    "hdfs": "set HADOOP_USER_NAME, or get a Kerberos ticket, for one who may",
}
