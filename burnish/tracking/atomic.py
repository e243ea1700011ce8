"""Files of a run directory that are whole or not there, whenever the writer is killed."""

from __future__ import annotations

import re
from pathlib import Path

from burnish.files.durable import write_durably
from burnish.files.storage import LocalStorage


def write_atomically(path: Path, content: str | bytes) -> None:
    r"""Put `content` at `path`, replacing what is there; text is UTF-8, lone surrogates become `\udXXX`.

    Makes the directory. Raises `OSError` and leaves the old file if it fails.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(LocalStorage(), path, data)


def discard_leftovers(directory: Path) -> None:
    """Remove what writers that were killed left half written in `directory`, which may be missing."""
    if directory.is_dir():
        for path in directory.iterdir():
            if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
                path.unlink(missing_ok=True)
