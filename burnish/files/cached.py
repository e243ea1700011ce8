"""Copies on this machine of files behind URLs, each made once and whole or not there.

A copy belongs to the sizes and versions that its files had, so that one that has grown old is never
taken for what is there now, and one in use is never changed. It lies in the cache under a name of
theirs, which it gets by one rename. While one process copies, others that want the same wait for its
lock, which the system takes back from the dead. What a killed process had copied is hashed against a
journal and kept. `file://` is not copied.

The cache is `~/.cache/burnish`, or what BURNISH_CACHE names. It may be removed whenever no run uses it;
nothing else removes what is in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from burnish.errors import BurnishError, UsageError
from burnish.files.remote import RemoteFile
from burnish.files.selection import Selection
from burnish.files.storage import LocalStorage

log = logging.getLogger("burnish")

_PIECE = 4 << 20
_THREADS = 8
_RESERVE = 100_000_000
_MEGA = 1e6
_STORAGE = LocalStorage()


class Bar(Protocol):
    """Progress of a copy."""

    def advance(self, count: float = 1) -> None:
        """So many megabytes more."""


Watch = Callable[[str, float], AbstractContextManager[Bar]]
"""Shows a copy with this name and so many megabytes while the block runs."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of one file."""

    file: RemoteFile
    offset: int
    size: int


def cache_directory() -> Path:
    """Where copies lie."""
    return Path(os.environ.get("BURNISH_CACHE") or "~/.cache/burnish").expanduser()


def copied(selection: Selection, watch: Watch | None = None) -> Path:
    """A directory of this machine with exactly the selected files in it, under their names; made where it is missing.

    Raises `BurnishError` where the cache has no room or cannot be written, where a file changes while
    it is copied, and what reading it raises; what is copied by then is kept for the next attempt.
    """
    url = selection.remote.url
    if url.scheme == "file":
        return Path("/", url.path)
    _check_names(selection)
    copy = _Copy(selection, cache_directory())
    if copy.is_whole():
        return copy.path
    with _writing(copy.path.parent), copy.locked():
        if not copy.is_whole():
            copy.make(watch)
    return copy.path


class _Copy:
    """One entry of the cache: its directory, and beside it its lock, its beginnings and their journal."""

    def __init__(self, selection: Selection, root: Path) -> None:
        self._remote = selection.remote
        self._files = selection.files
        self._bytes = sum(file.size for file in selection.files)
        listed = [[file.name, file.size, file.version] for file in selection.files]
        key = hashlib.sha256(json.dumps([str(self._remote.url), listed]).encode()).hexdigest()[:24]
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", self._remote.url.name)[-40:].lstrip(".")
        name = f"{readable or self._remote.url.scheme}-{key}"
        self.path = root / name
        self._partial = root / f".{name}.partial"
        self._journal = root / f".{name}.journal"
        self._lock = root / f".{name}.lock"

    def is_whole(self) -> bool:
        """Whether every file is there with its size."""
        return all(_size(self.path / file.name) == file.size for file in self._files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; a lock of the system's, not of anything that a crash leaves behind."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process is copying %s; waiting for it", self._remote.url)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def make(self, watch: Watch | None) -> None:
        """Copy what is missing, then show the copy under its name."""
        if self.path.exists():  # somebody has taken from it
            shutil.rmtree(self.path)
        self._partial.mkdir(exist_ok=True)
        done = self._read_journal()
        self._check_room(done)
        for file in self._files:
            _allocate(self._partial / file.name, file.size)
        name = f"copying {self._remote.url}"
        with watch(name, self._bytes / _MEGA) if watch else nullcontext() as bar:
            self._copy_pieces(done, bar)
        for file in self._files:
            with _STORAGE.open(self._partial / file.name) as written:
                written.sync()
        self._check_unchanged()
        self._partial.rename(self.path)
        _STORAGE.sync_dir(self.path.parent)
        self._journal.unlink()

    def _copy_pieces(self, done: Mapping[tuple[str, int], str], bar: Bar | None) -> None:
        """Copy in several threads, which are left behind when one of them fails or this one is interrupted."""
        todo: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        results: queue.SimpleQueue[tuple[_Piece, str] | BaseException] = queue.SimpleQueue()
        stop = threading.Event()
        pieces = 0
        for file in self._files:
            for offset in range(0, file.size, _PIECE):
                todo.put(_Piece(file, offset, min(_PIECE, file.size - offset)))
                pieces += 1

        def work() -> None:
            while not stop.is_set():
                try:
                    piece = todo.get_nowait()
                    results.put((piece, self._copy_piece(piece, done, stop)))
                except queue.Empty:
                    return
                except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                    results.put(error)
                    return

        for _ in range(min(_THREADS, pieces)):
            threading.Thread(target=work, daemon=True).start()
        try:
            with self._journal.open("a") as journal:
                for _ in range(pieces):
                    result = results.get()
                    if isinstance(result, BaseException):
                        raise result
                    piece, digest = result
                    print(
                        json.dumps([piece.file.name, piece.offset, digest]),
                        file=journal,
                        flush=True,
                    )
                    if bar is not None:
                        bar.advance(piece.size / _MEGA)
        finally:
            stop.set()

    def _copy_piece(
        self, piece: _Piece, done: Mapping[tuple[str, int], str], stop: threading.Event
    ) -> str:
        """Fetch a piece unless it is there already; returns its hash. After `stop` it writes nothing: the file may be whole by then."""
        buffer = bytearray(piece.size)
        known = done.get((piece.file.name, piece.offset))
        with _STORAGE.open(self._partial / piece.file.name, write=True) as file:
            if known is not None:
                file.pread_into(buffer, piece.offset)
                if xxhash.xxh3_128_hexdigest(buffer) == known:
                    return known
            self._remote.read_into(piece.file.name, buffer, piece.offset)
            if not stop.is_set():
                file.pwrite(buffer, piece.offset)
        return xxhash.xxh3_128_hexdigest(buffer)

    def _read_journal(self) -> dict[tuple[str, int], str]:
        """The hashes of pieces that were written; whether they are there still is looked at piece by piece."""
        done = {}
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        for line in lines:
            try:
                name, offset, digest = json.loads(line)
            except ValueError:  # half a line, from a kill
                continue
            done[name, offset] = digest
        return done

    def _check_room(self, done: Mapping[tuple[str, int], str]) -> None:
        root = self.path.parent
        there = sum(_size(self._partial / file.name) or 0 for file in self._files) if done else 0
        needed, free = self._bytes - there + _RESERVE, _STORAGE.free_bytes(root)
        if needed > free:
            raise BurnishError(
                f"there is no room to copy {self._remote.url} to {root}",
                have=f"{free:,} bytes",
                want=f"{needed:,} bytes",
                do="make room, or set BURNISH_CACHE to another directory",
            )

    def _check_unchanged(self) -> None:
        """Refuse to show a copy whose beginning and end may be of different versions."""
        with ThreadPoolExecutor(_THREADS) as pool:
            now = pool.map(self._remote.stat, [file.name for file in self._files])
            for file, found in zip(self._files, now, strict=True):
                if found != file:
                    raise BurnishError(
                        f"{self._remote.url.below(file.name)} changed while it was copied",
                        have=found.version if found else "no such file",
                        want=file.version,
                        do="start again when nobody writes to it",
                    )


def _check_names(selection: Selection) -> None:
    """An object may be called anything; a file here must not lie outside of its copy."""
    for file in selection.files:
        if any(part in ("", ".", "..") for part in file.name.split("/")) or "\0" in file.name:
            raise UsageError(
                f"{selection.remote.url} holds a file whose name cannot be one here",
                have=repr(file.name),
                do="rename it there",
            )


def _allocate(path: Path, size: int) -> None:
    """A file of this length; what an earlier attempt left in it stays."""
    if _size(path) == size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with _STORAGE.create(path, size):
        pass


def _size(path: Path) -> int | None:
    """A file's length; None where there is none."""
    return path.stat().st_size if path.is_file() else None


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BurnishError(
            f"the cache {root} cannot be written",
            have=error,
            do="make room there, or set BURNISH_CACHE to a directory that can be written",
        ) from error
