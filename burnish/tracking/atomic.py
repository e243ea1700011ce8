"""Files that are whole or not there: written beside their place, then renamed into it.

A reader (a person, a plot, a run that resumes) never meets half a file, whenever the writer is
killed. Left out: checkpoints, which have a commit protocol of their own (`burnish.checkpoint`).
"""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Put `content` at `path`, replacing what is there; text is written as UTF-8.

    The directory is made when missing. Lone surrogates in text, which UTF-8 cannot hold, are
    written as `\\udXXX`. Raises `OSError` (no space, no permission) and leaves the old file then.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
