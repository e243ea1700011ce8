"""Make a file of the cache once for all processes of a machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import xxhash

from burnish.files.cache import cache_root
from burnish.files.durable import write_durably
from burnish.files.lease import locked
from burnish.files.storage import LOCAL


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
