"""Select files behind a URL, and copy them to this machine once. `file://` is not copied.

A copy's name depends on its files' sizes and versions, so a copy in use never changes. While one process copies, others wait
for its lock. After a crash, the next process keeps the pieces that a journal of hashes confirms.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import xxhash

from burnish.errors import BurnishError, MissingError, UsageError, few
from burnish.files.backends import RemoteFile
from burnish.files.cache import cache_root
from burnish.files.durable import naming_failures
from burnish.files.lease import locked
from burnish.files.remote import Remote
from burnish.files.storage import LOCAL

log = logging.getLogger("burnish")

_PIECE = 4 << 20
_THREADS = 8
_RESERVE = 100_000_000
_MEGA = 1e6
_DO = "correct the URL, or put the file there"
_WILDCARD = re.compile(r"[*?[]")


Watch = Callable[[str, float], AbstractContextManager[Any]]
"""Shows a copy's name and size in megabytes while the block runs; yields a bar with `advance(megabytes)`."""


@dataclass(frozen=True, slots=True)
class Selected:
    """Files below one URL."""

    remote: Remote
    """The files' names are relative to its URL."""
    files: tuple[RemoteFile, ...]
    """At least one, sorted by name."""


def local_files(url: str, wanted: Callable[[str], bool], watch: Watch | None = None) -> list[Path]:
    """Copy the files that `select` finds at a URL, and return their paths."""
    selection = select(Remote(url), wanted)
    directory = copied(selection, watch)
    return [directory / file.name for file in selection.files]


def select(remote: Remote, wanted: Callable[[str], bool], *, deep: bool = False) -> Selected:
    """Return the file at a URL, the `wanted` files in its directory, or the files that match its pattern. `deep` includes
    subdirectories.

    Patterns are those of `glob`, but an existing path is no pattern. Wildcards match no hidden files. Raises `MissingError`.
    """
    only = remote.stat() if remote.url.path else None
    if only is not None:
        return Selected(remote.parent(), (replace(only, name=remote.url.name),))
    present_files = remote.files(deep=deep)
    if files := tuple(file for file in present_files if wanted(file.name)):
        return Selected(remote, files)
    if _WILDCARD.search(remote.url.path) and not present_files:
        return _select_pattern(remote)
    raise MissingError(
        f"there is nothing to read at {remote}",
        have=few([file.name for file in present_files]) or "no file",
        want="a file, a directory of such files, or a pattern that matches",
        do=_DO,
    )


def _select_pattern(remote: Remote) -> Selected:
    parts = remote.url.path.split("/")
    plain = next(index for index, part in enumerate(parts) if _WILDCARD.search(part))
    pattern = parts[plain:]
    above = remote
    for _ in pattern:
        above = above.parent()
    candidates = above.files(deep=len(pattern) > 1 or pattern == ["**"])
    files = tuple(file for file in candidates if matches(file.name.split("/"), pattern))
    if not files:
        raise MissingError(
            f"nothing matches the pattern {remote.url}",
            have=f"below {above}: {few([file.name for file in candidates]) or 'no file'}",
            want="a pattern that matches a file",
            do=_DO,
        )
    return Selected(above, files)


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a name's parts match a pattern's."""
    if not pattern:
        return not parts
    if not parts:
        return False
    hidden = parts[0].startswith(".")
    if pattern[0] == "**":
        matches_no_part = len(pattern) > 1 and matches(parts, pattern[1:])
        last = len(pattern) == len(parts) == 1
        return matches_no_part or (not hidden and (last or matches(parts[1:], pattern)))
    if hidden and not pattern[0].startswith("."):
        return False
    return fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


def copied(selection: Selected, watch: Watch | None = None) -> Path:
    """Return a local directory with exactly the selected files; copy them if needed.

    Raises `BurnishError` if the cache has no room or cannot be written, or if a file changes meanwhile.
    """
    url = selection.remote.url
    if url.scheme == "file":
        return Path("/", url.path)
    _check_names(selection)
    root = cache_root()
    copy = _Copy(selection, root)
    if not copy.is_whole():
        do = "make room there, or set BURNISH_CACHE to a directory that can be written"
        with naming_failures(f"the cache {root} cannot be written", do), copy.locked():
            if not copy.is_whole():
                copy.make(watch)
    return copy.path


class _Copy:
    def __init__(self, selection: Selected, root: Path) -> None:
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
        return all(_size(self.path / file.name) == file.size for file in self._files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self._lock, wait=False))
            except BlockingIOError:
                log.info("another process is copying %s; waiting for it", self._remote.url)
                stack.enter_context(locked(self._lock))
            yield

    def make(self, watch: Watch | None) -> None:
        if self.path.exists():  # a user removed some of its files
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
            with LOCAL.open(self._partial / file.name) as written:
                written.sync()
        self._check_unchanged()
        self._partial.rename(self.path)
        LOCAL.sync_dir(self.path.parent)
        self._journal.unlink()

    def _copy_pieces(self, done: Mapping[tuple[str, int], str], bar: Any | None) -> None:
        pieces = [(f, offset) for f in self._files for offset in range(0, f.size, _PIECE)]
        stop = threading.Event()

        def copy(piece: tuple[RemoteFile, int]) -> tuple[RemoteFile, int, str]:
            return *piece, self._copy_piece(*piece, done, stop)

        # The pool's threads are daemons. Leaving the block does not wait for them.
        with ThreadPool(_THREADS) as pool, self._journal.open("a") as journal:
            try:
                for file, offset, digest in pool.imap_unordered(copy, pieces):
                    print(json.dumps([file.name, offset, digest]), file=journal, flush=True)
                    if bar is not None:
                        bar.advance(min(_PIECE, file.size - offset) / _MEGA)
            finally:
                stop.set()

    def _copy_piece(
        self,
        file: RemoteFile,
        offset: int,
        done: Mapping[tuple[str, int], str],
        stop: threading.Event,
    ) -> str:
        """Copy a piece; return its hash. Write nothing after `stop`: another process may have finished the file."""
        buffer = bytearray(min(_PIECE, file.size - offset))
        known = done.get((file.name, offset))
        with LOCAL.open(self._partial / file.name, write=True) as copy:
            if known is not None:
                copy.pread_into(buffer, offset)
                if xxhash.xxh3_128_hexdigest(buffer) == known:
                    return known
            self._remote.read_into(file.name, buffer, offset)
            if not stop.is_set():
                copy.pwrite(buffer, offset)
        return xxhash.xxh3_128_hexdigest(buffer)

    def _read_journal(self) -> dict[tuple[str, int], str]:
        done = {}
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        for line in lines:
            try:
                name, offset, digest = json.loads(line)
            except ValueError:  # a killed process left half a line
                continue
            done[name, offset] = digest
        return done

    def _check_room(self, done: Mapping[tuple[str, int], str]) -> None:
        root = self.path.parent
        present = sum(_size(self._partial / file.name) or 0 for file in self._files) if done else 0
        needed = self._bytes - present + _RESERVE
        free = LOCAL.free_bytes(root)
        if needed > free:
            raise BurnishError(
                f"there is no room to copy {self._remote.url} to {root}",
                have=f"{free:,} bytes",
                want=f"{needed:,} bytes",
                do="make room, or set BURNISH_CACHE to another directory",
            )

    def _check_unchanged(self) -> None:
        with ThreadPool(_THREADS) as pool:
            stats = pool.imap(self._remote.stat, [file.name for file in self._files])
            for file, current in zip(self._files, stats, strict=True):
                if current != file:
                    raise BurnishError(
                        f"{self._remote.url.below(file.name)} changed while it was copied",
                        have=current.version if current else "no such file",
                        want=file.version,
                        do="start again when nobody writes to it",
                    )


def _check_names(selection: Selected) -> None:
    for file in selection.files:
        if any(part in ("", ".", "..") for part in file.name.split("/")) or "\0" in file.name:
            raise UsageError(
                f"{selection.remote.url} holds a file whose name is not possible on this machine",
                have=repr(file.name),
                do="rename it there",
            )


def _allocate(path: Path, size: int) -> None:
    if _size(path) == size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with LOCAL.create(path, size):
        pass


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
