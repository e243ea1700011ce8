"""Files of a run directory that are whole or not there.

A reader (a person, a plot, a run that resumes) never meets half a file, whenever the writer is
killed. Left out: checkpoints, which have a commit protocol of their own (`burnish.checkpoint`).
"""

from __future__ import annotations

import re
from pathlib import Path

from burnish.files.durable import write_durably
from burnish.files.storage import LocalStorage


def write_atomically(path: Path, content: str | bytes) -> None:
    """Put `content` at `path`, replacing what is there; text is written as UTF-8.

    The directory is made when missing. Lone surrogates in text, which UTF-8 cannot hold, are
    written as `\\udXXX`. Raises `OSError` (no space, no permission) and leaves the old file then.
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
