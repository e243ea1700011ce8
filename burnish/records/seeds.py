"""Seeds that are derived, not carried.

Every random draw of a run comes from a generator seeded with the run's seed, a purpose and indices
(step, epoch, prompt). So there is no random state to save, and batching, the number of ranks and
resuming change nothing. Left out: the generators themselves.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A 64-bit seed for one purpose, unrelated to that of any other parts.

    `derive_seed(seed, "shuffle", epoch)` is the same on every machine and in every process. The
    type and the length of each part enter the hash, so ("1",) and (1,) differ, as do ("ab", "c")
    and ("a", "bc"). Returns an integer in [0, 2^64), from BLAKE2b (RFC 7693).
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (run_seed, *parts):
        kind = "s" if isinstance(part, str) else "i"
        text = str(part).encode()
        digest.update(f"{kind}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "little")
