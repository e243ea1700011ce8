"""The cache: `burnish` in `XDG_CACHE_HOME` (`~/.cache`), or `BURNISH_CACHE`. Users may remove unused files.

A kept file's name is a digest of everything that determines its content. It appears by one rename and holds its own digest, so
processes and runs may share it.
"""

from __future__ import annotations

import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from burnish.files.durable import write_durably
from burnish.files.storage import LOCAL

_HEAD = 32
_log = logging.getLogger(__name__)


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


def write_kept(folder: str, key: str, body: bytes, most_bytes: int, what: str) -> None:
    """Keep `body`, and remove the folder's least recently used files over `most_bytes`. If that fails, only warn, naming `what`."""
    directory = cache_root() / folder
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(LOCAL, directory / key, xxhash.xxh3_128_hexdigest(body).encode() + body)
        _remove_old(directory, most_bytes)
    except OSError as error:
        _log.warning("%s are not kept for the next start: %s", what, error)


def _remove_old(directory: Path, most_bytes: int) -> None:
    """Remove the least recently used files over `most_bytes`. Other processes may do so at the same time."""
    files = []
    for file in directory.iterdir():
        with suppress(FileNotFoundError):
            files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > most_bytes:
            file.unlink(missing_ok=True)
