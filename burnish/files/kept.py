"""Keep files in the cache, for `burnish.files.cache.read_kept`."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import xxhash

from burnish.files.cache import cache_root
from burnish.files.durable import write_durably
from burnish.files.storage import LOCAL

_log = logging.getLogger(__name__)


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
