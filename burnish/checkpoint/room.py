"""Whether the disk has room for a step, asked before anything of it is written. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.errors import BurnishError, few
from burnish.files.storage import Storage


@dataclass(frozen=True, slots=True)
class Waiting:
    """Steps that could go, were they on the mirror."""

    mirror: str
    """Its URL."""
    steps: Sequence[int]
    """Which, oldest first."""


def require_room(
    root: Path,
    step: int,
    needed: int,
    reserve: int,
    storage: Storage,
    waiting: Callable[[], Waiting | None] = lambda: None,
) -> None:
    """Raise `BurnishError` where less than `needed` + `reserve` bytes are free below `root`.

    It names what is `waiting`, which is asked for then alone: such steps exist only here, and make no room.
    """
    storage.make_dirs(root)
    free = storage.free_bytes(root)
    if free >= needed + reserve:
        return
    have = f"{free / 1e9:.3f} GB free where {root} lies"
    do = "free some space, or set checkpoint.keep_last or checkpoint.reserve_gb lower"
    if (kept := waiting()) is not None and kept.steps:
        names = few([str(each) for each in kept.steps])
        have += f"; not on {kept.mirror} yet, and kept for it: {names}"
        do = f"see that {kept.mirror} can be reached: what is on it makes room; or free some space"
    raise BurnishError(
        f"the disk has no room for step {step}",
        have=have,
        want=f"{needed / 1e9:.3f} GB for the step and {reserve / 1e9:.3f} GB in reserve",
        do=do,
    )
