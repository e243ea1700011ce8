"""The cache: `burnish` in `XDG_CACHE_HOME` (`~/.cache`), or `BURNISH_CACHE`. Users may remove unused files.

A kept file's name is a digest of everything that determines its content. It appears by one rename and holds its own digest, so
processes and runs may share it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import xxhash

_HEAD = 32


def cache_root() -> Path:
    """Return the cache's directory."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("BURNISH_CACHE") or Path(above, "burnish")).expanduser()


def read_kept(folder: str, key: str) -> memoryview | None:
    """Map what a file of a folder holds, or return None if it is missing or damaged."""
    path = cache_root() / folder / key
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        os.utime(path)
    except (OSError, ValueError):  # mmap takes no empty file
        return None
    body = content[_HEAD:]
    is_whole = xxhash.xxh3_128_hexdigest(body).encode() == content[:_HEAD]
    return body if is_whole else None
