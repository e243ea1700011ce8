"""Object stores by way of fsspec: S3 (s3fs), Google Cloud Storage (gcsfs), and fsspec's own memory.

An object is there whole or not at all, so nothing is written under another name first. Listings are
never cached. The libraries' own retries are kept few: `burnish.files.remote` has the patience.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

from burnish.files.backend import Found, Verdict, verdict_of
from burnish.files.patience import Pulse
from burnish.files.storage import Bytes

_PART = 8 << 20
_PARALLEL_PARTS = 4
_MAX_PARTS = 10_000
_CONNECT_SECONDS = 10
_READ_SECONDS = 30
_MAX_ATTEMPTS = 2
_VERSIONS = ("ETag", "etag", "generation", "created")


class ObjectStore:
    """Buckets and keys behind one of fsspec's file systems."""

    def __init__(
        self,
        system: Any,
        faults: tuple[type[Exception], ...],
        verdict: Callable[[Exception], Verdict | None],
    ) -> None:
        self._system = system
        self._verdict = verdict
        self.faults = (OSError, *faults)

    def verdict(self, error: Exception) -> Verdict:
        """What the service said, or else the system."""
        said = self._verdict(error)
        if said is None:
            return verdict_of(error) if isinstance(error, OSError) else "transient"
        return said

    def files(self, path: str, *, deep: bool) -> Iterator[Found]:
        """Objects below a prefix, without the empty ones that stand for directories."""
        if deep:
            listed = self._system.find(path, detail=True).values()
        else:
            try:
                listed = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return
        for info in listed:
            name = info["name"]
            if info["type"] == "file" and name != path and not name.endswith("/"):
                yield _found(info)

    def names(self, path: str) -> Iterator[str]:
        """Names directly below a prefix."""
        try:
            listed = self._system.ls(path, detail=False)
        except FileNotFoundError:
            return
        for each in listed:
            if each.rstrip("/") != path:
                yield each.rstrip("/").rpartition("/")[2]

    def info(self, path: str) -> Found:
        """An object."""
        info = self._system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return _found(info)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A range of an object."""
        data: bytes = self._system.cat_file(path, start=offset, end=offset + size)
        return data

    def put(self, path: str, data: Bytes) -> None:
        """One object, in one request or in parts."""
        self._system.pipe_file(path, bytes(data))

    def put_file(self, path: str, source: Path, pulse: Pulse) -> None:
        """One object, large ones in parts; S3's several at a time."""
        parts = -(-source.stat().st_size // _PART)
        chunk = _PART * max(1, -(-parts // _MAX_PARTS))
        self._system.put_file(str(source), path, callback=_Pulsing(pulse), chunksize=chunk)

    def remove(self, path: str) -> None:
        """One object."""
        try:
            self._system.rm_file(path)
        except (FileNotFoundError, KeyError):  # fsspec's memory raises the latter
            return

    def remove_below(self, path: str, pulse: Pulse) -> None:
        """All objects below a prefix, and those that stand for directories, one after the other."""
        for name in self._system.find(path):
            if name != path:
                self.remove(name)
                pulse(0)


class _Pulsing(Callback):  # type: ignore[misc]
    """fsspec's way to hear of progress: its `value` is the bytes that have moved."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse
        self._told = 0

    def call(self, hook_name: str | None = None, **_: Any) -> None:
        """Told whenever `value` has changed."""
        if self.value != self._told:
            self._pulse(self.value - self._told)
            self._told = self.value


def open_s3() -> ObjectStore:
    """S3 and what speaks its protocol; credentials, region and endpoint as botocore finds them (AWS_ENDPOINT_URL, ~/.aws)."""
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
    return ObjectStore(system, faults, verdict)


def open_gs() -> ObjectStore:
    """Google Cloud Storage; credentials as google-auth finds them, STORAGE_EMULATOR_HOST for another endpoint."""
    import aiohttp
    from gcsfs.core import (
        GCSFileSystem,
    )  # the package's own name asks for the bucket's kind before each use
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    def verdict(error: Exception) -> Verdict | None:
        if isinstance(error, GoogleAuthError) or str(error).startswith("Forbidden"):
            return "denied"
        if isinstance(error, ValueError):  # a bad request
            return "wrong"
        code = int(getattr(error, "code", None) or 0) if isinstance(error, HttpError) else 0
        if code in (401, 403):
            return "denied"
        return "wrong" if 400 <= code < 500 and code not in (408, 429) else None

    system = GCSFileSystem(
        use_listings_cache=False, skip_instance_cache=True, requests_timeout=_READ_SECONDS
    )
    faults = (HttpError, GoogleAuthError, aiohttp.ClientError, ValueError)
    return ObjectStore(system, faults, verdict)


class _Memory(ObjectStore):
    """Its objects appear whole, too."""

    def put_file(self, path: str, source: Path, pulse: Pulse) -> None:
        """Read, then put."""
        content = source.read_bytes()
        pulse(len(content))
        self.put(path, content)


def open_memory() -> ObjectStore:
    """Objects in this process's memory, all of them in one store."""
    import fsspec

    return _Memory(fsspec.filesystem("memory"), (), lambda error: None)


def _found(info: dict[str, Any]) -> Found:
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    if isinstance(version, datetime):  # fsspec's memory has it in two ways
        version = version.timestamp()
    return Found(info["name"], int(info["size"]), str(version).strip('"'))
