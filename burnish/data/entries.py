"""The local files of an entry of `data`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from burnish.files.hub import local_part


class EntryFiles(NamedTuple):
    """The local files of an entry."""

    files: list[Path]
    notice: str
    """A sentence about files that are left out, or that are read although their names speak against it; "" for neither."""


def entry_files(path: str, setting: str) -> EntryFiles:
    """Return the local files of an entry: a file, a folder, a folder's split, or a pattern.

    Raises `MissingError` for a folder without the split, and `UsageError` for an incomplete one.
    """
    folder, part = local_part(path)
    if folder.exists() and not folder.is_dir():
        return EntryFiles([folder], "")
    from burnish.data.splits import local_folder_files, pattern_files

    if folder.is_dir():
        return EntryFiles(*local_folder_files(folder, part, setting))
    return EntryFiles(*pattern_files(path, folder, setting))
