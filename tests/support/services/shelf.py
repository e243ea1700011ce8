"""A storage service of one's own: a file to name in URLs, whose class keeps each host in a folder beside the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.errors import BurnishError
from burnish.files.backends import FileBackend, RemoteFile


class Shelf(FileBackend):
    """`shelf.py:Shelf://NAME/PATH` is shelves/NAME/PATH beside the file."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._root = str(Path(__file__).parent / "shelves" / host)

    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        for each in super().entries(self._root + path, deep=deep):
            yield replace(each, name=each.name.removeprefix(self._root))

    def info(self, path: str) -> RemoteFile:
        return super().info(self._root + path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        return super().read(self._root + path, offset, size)

    def write(self, path: str, source: Any, pulse: Any) -> None:
        super().write(self._root + path, source, pulse)

    def remove(self, path: str) -> None:
        super().remove(self._root + path)

    def remove_below(self, path: str, pulse: Any) -> None:
        super().remove_below(self._root + path, pulse)


class Catalogue:
    """One that can only be read, and inherits from nothing."""

    faults = (OSError,)

    def __init__(self, host: str) -> None:
        self._shelf = Shelf(host)

    def verdict(self, error: Exception) -> str:
        return self._shelf.verdict(error)

    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        return self._shelf.entries(path, deep=deep)

    def info(self, path: str) -> RemoteFile:
        return self._shelf.info(path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        return self._shelf.read(path, offset, size)


class Closed(Shelf):
    """One that cannot be opened."""

    def __init__(self, host: str) -> None:
        raise BurnishError("the library is closed", do="come back tomorrow")


class Torn(Shelf):
    """One with a mistake."""

    def entries(self, path: str, *, deep: bool) -> Iterator[RemoteFile]:
        raise KeyError(path)
