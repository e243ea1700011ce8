"""The cache: `burnish` in `XDG_CACHE_HOME` (`~/.cache`), or `BURNISH_CACHE`. Users may remove unused files."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import xxhash

from burnish.files.durable import write_durably
from burnish.files.lease import locked
from burnish.files.storage import LOCAL


def cache_root() -> Path:
    """Return the cache's directory."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("BURNISH_CACHE") or Path(above, "burnish")).expanduser()


def made_once(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the bytes that `make` returns in the first process to ask for a name; later processes read the cache.

    A damaged cache file is made again.
    """
    path = cache_root() / name
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or no place for a cache
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path.with_name(f"{path.name}.lock")))
        with suppress(OSError):
            digest, _, content = path.read_bytes().partition(b"\n")
            if xxhash.xxh3_128_hexdigest(content).encode() == digest:
                return content
        new_content = make()
        with suppress(OSError):
            digest = xxhash.xxh3_128_hexdigest(new_content).encode()
            write_durably(LOCAL, path, digest + b"\n" + new_content)
        return new_content
