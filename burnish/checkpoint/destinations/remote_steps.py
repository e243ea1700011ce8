"""Committed steps behind a URL, read like those on a disk. COMMIT is written last and removed first."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import PurePath, PurePosixPath
from typing import NoReturn, Self

from burnish.checkpoint.manifest import BLOCK_BYTES, COMMIT
from burnish.checkpoint.steps import step_number
from burnish.errors import CorruptError, MissingError
from burnish.files.remote import Remote
from burnish.files.storage import Closing, Entry, Kind
from burnish.files.urls import Url

DAMAGED = "DAMAGED"
"""The file that replaces COMMIT in a step that could not be resumed from. It says why."""

_NO_HOST = "*"
"""Stands for the host of a URL without one. No host has this name."""
_READS_AT_ONCE = 8
_BLOCKS_HELD = 8


class RemotePath(PurePosixPath):
    """A URL with a path's `/`, `name` and `parent`."""

    @classmethod
    def of(cls, url: Url) -> Self:
        """Return a URL's path."""
        return cls(f"{url.scheme}:", url.host or _NO_HOST, url.path)

    def __str__(self) -> str:
        scheme, slash, rest = super().__str__().partition(":/")
        if not slash:  # a relative path
            return scheme
        host, _, path = rest.partition("/")
        return str(Url(scheme, "" if host == _NO_HOST else host, path))

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is not on this machine")


class RemoteSteps:
    """A directory of steps behind a URL; a `Source`. `refresh` forgets its listing.

    Raises `BurnishError` for permanent faults.
    """

    reads_at_once = _READS_AT_ONCE

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        """The same directory, for changes to it."""
        self.root = RemotePath.of(remote.url)
        self.block = lru_cache(_BLOCKS_HELD)(self._read_block)
        """Returns a block by its file's name and its number. Caches the last few."""
        self._listed: tuple[str, dict[str, int]] | None = None

    def entries(self, path: PurePath) -> list[Entry]:
        """List a directory, without steps that lack COMMIT."""
        name = self.name_of(path)
        sizes = self._sizes(name)
        prefix = f"{name}/" if name else ""
        entries: dict[str, Entry] = {}
        for file, size in sizes.items():
            if file.startswith(prefix):
                head, slash, _ = file.removeprefix(prefix).partition("/")
                if not slash:
                    entries[head] = Entry(head, "file", size)
                elif name or f"{head}/{COMMIT}" in sizes:
                    entries[head] = Entry(head, "directory", 0)
        return [entries[head] for head in sorted(entries)]

    def kind(self, path: PurePath) -> Kind | None:
        """Return the kind of a path; None for a step without COMMIT."""
        name = self.name_of(path)
        sizes = self._sizes(name)
        if name in sizes:
            return "file"
        is_sealed = f"{name.partition('/')[0]}/{COMMIT}" in sizes
        is_there = any(file.startswith(f"{name}/") for file in sizes)
        return "directory" if is_sealed and is_there else None

    def open(self, path: PurePath) -> _RemoteReader:
        """Open a file; a missing one raises when it is read."""
        return _RemoteReader(self, self.name_of(path))

    def size(self, name: str) -> int:
        """Return a file's size. Raises `FileNotFoundError`."""
        if self._listed is not None and name in self._listed[1]:
            return self._listed[1][name]
        if (file := self.remote.stat(name)) is None:
            raise FileNotFoundError(f"{self.remote.url.below(name)}")
        return file.size

    def read_into(self, name: str, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from byte `offset`. Raises `FileNotFoundError` and `EOFError`."""
        try:
            self.remote.read_into(name, buffer, offset)
        except MissingError as error:
            raise FileNotFoundError(f"{self.remote.url.below(name)}") from error
        except CorruptError as error:
            raise EOFError(f"the file is too short: {error.have}") from error

    def _read_block(self, name: str, number: int) -> bytes:
        start = number * BLOCK_BYTES
        data = bytearray(max(0, min(BLOCK_BYTES, self.size(name) - start)))
        self.read_into(name, memoryview(data), start)
        return bytes(data)

    def damaged(self) -> list[str]:
        """Return the names of the damaged steps."""
        sizes = self._sizes("")
        heads = {name.partition("/")[0] for name in sizes if name.endswith(f"/{DAMAGED}")}
        return sorted(head for head in heads if f"{head}/{COMMIT}" not in sizes)

    def unfinished(self) -> list[str]:
        """Return the names of other steps without COMMIT."""
        sizes = self._sizes("")
        heads = {name.partition("/")[0] for name in sizes if "/" in name}
        uncommitted = {head for head in heads if step_number(head) is not None}
        uncommitted -= {head for head in uncommitted if f"{head}/{COMMIT}" in sizes}
        return sorted(uncommitted - {*self.damaged()})

    def clear(self, check: Callable[[], None]) -> None:
        """Remove unfinished steps while nobody sends, each after `check`. Looks up each COMMIT: stores may list late."""
        for name in self.unfinished():
            check()
            if self.remote.stat(f"{name}/{COMMIT}") is None:
                self.remove(self.root / name)

    def remove(self, path: PurePath) -> None:
        """Remove a step, COMMIT first."""
        name = self.name_of(path)
        self.remote.remove(f"{name}/{COMMIT}")
        self.remote.remove_below(name)

    def mark_damaged(self, path: PurePath, why: str) -> None:
        """Replace COMMIT by a file with the reason."""
        name = self.name_of(path)
        self.remote.put(f"{name}/{DAMAGED}", f"{why}\n".encode())
        self.remote.remove(f"{name}/{COMMIT}")

    def name_of(self, path: PurePath) -> str:
        """Return a path's name below the directory; "" for itself."""
        name = path.relative_to(self.root).as_posix()
        return "" if name == "." else name

    def refresh(self) -> None:
        """Forget the listings."""
        self.block.cache_clear()
        self._listed = None

    def _sizes(self, name: str) -> dict[str, int]:
        if self._listed is not None:
            listed, sizes = self._listed
            if not listed or name == listed or name.startswith(f"{listed}/"):
                return sizes
        sizes = {file.name: file.size for file in self.remote.files(name)}
        self._listed = (name, sizes)
        return sizes


class _RemoteReader(Closing):
    """A file behind a URL; a `ReadableFile`. Reads whole blocks."""

    def __init__(self, steps: RemoteSteps, name: str) -> None:
        self._steps = steps
        self._name = name

    def size(self) -> int:
        """Return its size."""
        return self._steps.size(self._name)

    def pread_into(self, buffer: bytearray | memoryview, offset: int) -> None:
        """Fill the buffer from `offset`."""
        unread = memoryview(buffer).cast("B")
        while unread:
            number, start = divmod(offset, BLOCK_BYTES)
            part = unread[: BLOCK_BYTES - start]
            if len(part) == BLOCK_BYTES:
                self._steps.read_into(self._name, part, offset)
            else:
                data = self._steps.block(self._name, number)[start : start + len(part)]
                if len(data) < len(part):
                    raise EOFError(f"the file ends {len(part) - len(data)} bytes too early")
                part[:] = data
            unread = unread[len(part) :]
            offset += len(part)

    def close(self) -> None:
        """Do nothing."""
