"""Files behind a URL: list, read in ranges, write whole, remove.

`Remote` retries errors that may pass. Every call ends in bounded time. Errors never name a credential. Threads may share a
`Remote`. It can be pickled, but not used in a process forked after its first use.

Pauses are drawn uniformly from [0, bound] ("full jitter", Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
2015).
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from burnish.errors import BurnishError, CorruptError, MissingError, UsageError, install
from burnish.extend import DESTINATIONS, SOURCES
from burnish.files.backends import Pulse, RemoteDestination, RemoteFile, Verdict
from burnish.files.storage import Bytes
from burnish.files.urls import SCHEMES, Url
from burnish.functions import failure
from burnish.redaction import redacted

T = TypeVar("T")

log = logging.getLogger("burnish")

_EXTRAS = {"s3": "s3", "gs": "gcs", "hdfs": "hdfs"}
_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of a permitted user",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS of a permitted user",
    "hdfs": "set HADOOP_USER_NAME, or get a Kerberos ticket, of a permitted user",
}
_CHANGES = ("written", "removed")
_REASON_CHARACTERS = 300
_WARN_AFTER = 3


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to try, in seconds."""

    tries: int = 24
    """Most attempts of one call."""
    seconds: float = 120.0
    """No attempt begins later than this after the first failure."""
    first_pause: float = 0.25
    """Upper bound of the first pause. It doubles after each failure."""
    longest_pause: float = 15.0
    """Upper bound of every pause."""
    silence: float = 60.0
    """An attempt is abandoned when no byte has moved for this long."""


class HungError(TimeoutError):
    """An attempt hung and was abandoned. It may still take effect in this process's life."""


class Remote:
    """The files at and below a URL. A name is a path below it; "" is the URL itself."""

    def __init__(self, url: str | Url, policy: RetryPolicy | None = None) -> None:
        self.url = Url.parse(url) if isinstance(url, str) else url
        self.policy = policy or RetryPolicy()
        self._connection = _Connection(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.url, self.policy))

    def __str__(self) -> str:
        return str(self.url)

    @property
    def may_change_late(self) -> bool:
        """Whether an abandoned write or removal may still take effect."""
        return self._connection.may_change_late

    def connect(self, *, writes: bool = False) -> None:
        """Load the client. Raises `MissingError` with the command that installs it, `UsageError` for one that cannot do its work."""
        self._connection.backend(writes=writes)

    def files(self, below: str = "", *, deep: bool = True) -> list[RemoteFile]:
        """Return a directory's files, sorted by name below the URL, with `deep` at any depth; [] if absent."""
        root = self.url.key
        files = [
            replace(entry, name=entry.name.removeprefix(root).strip("/"))
            for entry in self._entries(below, deep=deep)
            if entry.is_file
        ]
        return sorted(files, key=lambda file: file.name)

    def names(self, below: str = "") -> list[str]:
        """Return the names in a directory, sorted; [] if absent."""
        return sorted({each.name.rpartition("/")[2] for each in self._entries(below, deep=False)})

    def _entries(self, below: str, *, deep: bool) -> list[RemoteFile]:
        return self._retry(below, "listed", lambda b, key, _: list(b.entries(key, deep=deep)))

    def stat(self, name: str = "") -> RemoteFile | None:
        """Return a file's size and version; None if absent."""
        try:
            file = self._retry(name, "looked at", lambda backend, key, _: backend.info(key))
        except MissingError:
            return None
        return replace(file, name=name)

    def read_into(self, name: str, buffer: bytearray | memoryview, offset: int = 0) -> None:
        """Fill the buffer from byte `offset` of a file. Raises `MissingError`, and `CorruptError` if it ends too early."""
        view = memoryview(buffer).cast("B")
        if not view:
            return

        def read(backend: RemoteDestination, key: str, pulse: Pulse) -> bytes:
            try:
                data = backend.read(key, offset, len(view))
            except backend.faults as error:
                if backend.verdict(error) != "wrong":
                    raise
                data = b""  # some services refuse a range beyond the end
            if len(data) < len(view) <= backend.info(key).size - offset:
                raise ConnectionError(f"{len(data)} of {len(view)} bytes came")
            return data

        data = self._retry(name, "read", read)
        if len(data) != len(view):
            raise CorruptError(
                f"{self.url.below(name)} is shorter than it should be",
                want=f"{len(view)} bytes from byte {offset}",
                do="see that nobody writes there; if it is a copy, copy it again",
            )
        view[:] = data

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file. Raises `MissingError`, and `CorruptError` for more than `limit` bytes."""
        file = self.stat(name)
        if file is None:
            raise self._missing(name)
        if file.size > limit:
            raise CorruptError(
                f"{self.url.below(name)} is too long",
                have=f"{file.size} bytes",
                want=f"at most {limit}",
                do="put the right file there",
            )
        content = bytearray(file.size)
        self.read_into(name, content)
        return bytes(content)

    def put(self, name: str, data: Bytes) -> None:
        """Create or replace a file, which appears whole."""
        self._retry(name, "written", lambda backend, key, pulse: backend.write(key, data, pulse))

    def put_file(
        self, name: str, source: Path, advance: Callable[[int], None] | None = None
    ) -> None:
        """Create or replace a file, which appears whole, from a local file, in at most 64 MiB of memory.

        Another thread calls `advance` with bytes sent; a retry counts them again. Raises `BurnishError`, and `OSError` if the
        source is unreadable.
        """
        source.stat()  # an unreadable source raises here, not as an error of the service

        def send(backend: RemoteDestination, key: str, pulse: Pulse) -> None:
            def moved(count: int) -> None:
                pulse(count)
                if advance is not None:
                    advance(count)

            size = source.stat().st_size  # it may have grown since the last attempt
            backend.write(key, source, moved)
            sent = backend.info(key).size
            if sent != size:
                raise ConnectionError(f"{sent} of {size} bytes arrived")

        self._retry(name, "written", send)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self._retry(name, "removed", lambda backend, key, _: backend.remove(key))

    def remove_below(self, name: str) -> None:
        """Remove a directory tree, in any order."""
        self._retry(name, "removed", lambda backend, key, pulse: backend.remove_below(key, pulse))

    def below(self, name: str) -> Remote:
        """Return the files at and below a name."""
        return self._sharing(self.url.below(name))

    def parent(self) -> Remote:
        """Return the directory above."""
        return self._sharing(self.url.parent)

    def _sharing(self, url: Url) -> Remote:
        remote = Remote(url, self.policy)
        remote._connection = self._connection
        return remote

    def _key(self, name: str) -> str:
        if any(part in (".", "..") for part in name.split("/")):
            raise UsageError(
                f"{name!r} is not a name below {self.url}",
                want="a name without . and ..",
                do="write the path out",
            )
        return self.url.below(name).key

    def _retry(self, name: str, done: str, call: Callable[[RemoteDestination, str, Pulse], T]) -> T:
        key = self._key(name)
        url = self.url.below(name)
        backend = self._connection.backend(writes=done in _CHANGES)
        faults: tuple[type[Exception], ...] = (*backend.faults, TimeoutError)

        def again(error: Exception, failures: int) -> bool:
            if isinstance(error, HungError) and done in _CHANGES:
                self._connection.may_change_late = True
            transient = isinstance(error, faults) and backend.verdict(error) == "transient"
            if transient and failures == _WARN_AFTER:
                log.warning("%s could not be %s so far (%s); retrying", url, done, reason(error))
            return transient

        try:
            return retry(lambda pulse: call(backend, key, pulse), again, self.policy)
        except faults as error:
            verdict = backend.verdict(error)
            if verdict == "missing" and done != "written":
                raise self._missing(name) from error
            raise _explained(url, done, verdict, error) from error
        except Exception as error:
            if isinstance(error, BurnishError) or self.url.scheme in SOURCES.builtins:
                raise
            raise BurnishError(
                f"{url} cannot be {done}",
                have=failure(error),
                want=f"only errors that {self.url.scheme} has in its faults",
                do="correct the class",
            ) from error

    def _missing(self, name: str) -> MissingError:
        return MissingError(
            f"there is no {self.url.below(name)}", do="correct the URL, or put the file there"
        )


class _Connection:
    def __init__(self, url: Url) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._opened: tuple[int, RemoteDestination] | None = None
        self._is_destination = False
        self.may_change_late = False

    def backend(self, *, writes: bool) -> RemoteDestination:
        """Return the connection. Unless it `writes`, the class may lack what only a destination needs."""
        with self._lock:
            if writes and not self._is_destination:
                DESTINATIONS.load(self._url.scheme, str(self._url))
                self._is_destination = True
            if self._opened is None:
                self._opened = (os.getpid(), _open(self._url))
            pid, backend = self._opened
        if pid != os.getpid():
            raise RuntimeError(f"{self._url} was opened before this process was forked")
        return backend


def _open(url: Url) -> RemoteDestination:
    kind: Any = SOURCES.load(url.scheme, str(url))
    try:
        backend: RemoteDestination = kind(url.host)
    except ModuleNotFoundError as error:
        raise MissingError(
            f"{url.scheme}:// needs a package that is not installed",
            have=f"no module {error.name}",
            do=install(_EXTRAS[url.scheme]) if url.scheme in _EXTRAS else "install it",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # hdfs-native reads its configuration
        raise UsageError(
            f"{url} cannot be opened",
            have=reason(error),
            want=SCHEMES.get(url.scheme, f"a URL that {url.scheme} can open"),
            do="correct the URL, or the files in HADOOP_CONF_DIR"
            if url.scheme == "hdfs"
            else "correct the URL",
        ) from error
    SOURCES.require_complete(backend, url.scheme, str(url))
    return backend


def reason(error: BaseException) -> str:
    """Return an error in one line, without credentials."""
    text = str(error).replace("\\n", "\n").replace("\\t", "\t")
    text = text.partition("\n\tat ")[0]  # no Java trace
    return redacted(" ".join(f"{type(error).__name__}: {text}".split()))[:_REASON_CHARACTERS]


def _explained(url: Url, done: str, verdict: Verdict, error: Exception) -> BurnishError:
    have = reason(error)
    if verdict == "denied":
        return UsageError(
            f"{url} may not be {done} with the credentials given",
            have=have,
            do=_CREDENTIALS.get(url.scheme, "see who may use it"),
        )
    if verdict in ("wrong", "missing"):
        return BurnishError(
            f"{url} cannot be {done}", have=have, do="check the URL and the service"
        )
    return BurnishError(
        f"{url} could not be {done} after several tries",
        have=have,
        do="see that the service is up and can be reached from here, then start again",
    )


def retry(
    attempt: Callable[[Pulse], T], again: Callable[[Exception, int], bool], policy: RetryPolicy
) -> T:
    """Call `attempt` until it succeeds, the policy is exhausted, or `again(error, failures)` is false.

    A daemon thread runs it, so that a hung library can be abandoned. Raises the last error; `HungError` for a hang.
    """
    chance = random.SystemRandom()  # not the generator that users seed
    failed_at = None
    failures = 0
    while True:
        try:
            return _run(attempt, policy.silence)
        except Exception as error:
            failures += 1
            now = time.monotonic()
            failed_at = now if failed_at is None else failed_at
            bound = min(policy.longest_pause, policy.first_pause * 2 ** (failures - 1))
            pause = chance.uniform(0, bound)
            late = now + pause - failed_at > policy.seconds
            if not again(error, failures) or failures >= policy.tries or late:
                raise
            time.sleep(pause)


def _run(attempt: Callable[[Pulse], T], silence: float) -> T:
    moved_at = time.monotonic()

    def pulse(count: int) -> None:
        nonlocal moved_at
        moved_at = time.monotonic()

    future = begun(lambda: attempt(pulse))
    while not wait([future], max(0.0, moved_at + silence - time.monotonic())).done:
        if time.monotonic() - moved_at >= silence:
            raise HungError(f"nothing moved for {silence:g} s")
    return future.result()


def begun(work: Callable[[], T]) -> Future[T]:
    """Call `work` in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future
