"""Derive seeds from the run's seed, a purpose and indices (step, epoch, prompt).

So there is no random state to save. Batching, ranks and resuming do not change any draw.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """Return a 64-bit seed for one purpose, in [0, 2^64), from BLAKE2b (RFC 7693).

    `derive_seed(seed, "shuffle", epoch)` is the same on every machine. The hash includes each part's type and length, so ("1",) and
    (1,) differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (run_seed, *parts):
        kind = "s" if isinstance(part, str) else "i"
        text = str(part).encode()
        digest.update(f"{kind}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "little")
