"""Find out which ranks write to one disk.

If all do, a step is one directory. Otherwise a step's files are divided among the disks and meet on the mirror
as partial checkpoints; without a mirror several disks are refused. Leases tell who sees whom.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.files.lease import Token

_PAUSES = (0.0, 0.1, 0.3, 1.0)
# In seconds, before each look.
_PAUSES_BETWEEN_MACHINES = (*_PAUSES, 3.0, 10.0, 20.0, 40.0)
# An NFS client may take what it once found missing to be so for 60 seconds.


@dataclass(frozen=True, slots=True)
class Disks:
    """The disk of each rank. The first is that of rank 0."""

    of_rank: tuple[int, ...]
    """Which disk a rank writes to, by rank."""
    leaders: tuple[int, ...]
    """The rank that makes and names what is on a disk, by disk; it holds the lease there. Rank 0 leads the first."""

    @classmethod
    def one(cls, world: int) -> Self:
        """One for so many ranks."""
        return cls((0,) * world, (0,))

    @property
    def are_several(self) -> bool:
        """Whether a step is divided."""
        return len(self.leaders) > 1

    def divide(self, sizes: Sequence[int]) -> list[int]:
        """Assign a disk to each file of these sizes, so that ranks write about equally much. The same on all ranks."""
        writers = [self.of_rank.count(disk) for disk in range(len(self.leaders))]
        filled = [0] * len(writers)
        found = [0] * len(sizes)
        for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
            after = [(each + sizes[file]) / n for each, n in zip(filled, writers, strict=True)]
            found[file] = after.index(min(after))
            filled[found[file]] += sizes[file]
        return found


def find_disks(
    lease: Path, held: Token | None, take: Callable[[], Token], layout: Layout, *, may_differ: bool
) -> Disks:
    """Find the disks on which `lease` lies. Collective.

    Rank 0 has it `held`. A rank that does not see that holds its own with `take`, or finds that another such rank does. Raises
    `UsageError` on every rank if there are several disks and they may not differ, `BurnishError` if another run holds one.
    """
    pauses = _PAUSES if layout.local_world == layout.world else _PAUSES_BETWEEN_MACHINES
    main = gather_objects(held, layout)[0]
    sees_main = main is None or _number(lease, {main.number}, pauses) is not None
    everyone_sees = all(gather_objects(sees_main, layout))
    if everyone_sees:
        return Disks.one(layout.world)
    with agree(layout):
        if not (sees_main or may_differ):
            raise _refusal(lease, layout)
    own, refused = held, None
    if not sees_main:
        try:
            own = take()
        except BurnishError as error:
            refused = error
    numbers = [None if token is None else token.number for token in gather_objects(own, layout)]
    leaders = [rank for rank, number in enumerate(numbers) if number is not None]
    with agree(layout):
        found = _number(lease, {numbers[leader] for leader in leaders}, pauses)
        if found is None:
            raise refused or _refusal(lease, layout)
    of_rank = [numbers.index(number) for number in gather_objects(found, layout)]
    return Disks(tuple(leaders.index(leader) for leader in of_rank), tuple(leaders))


def _refusal(lease: Path, layout: Layout) -> UsageError:
    return UsageError(
        f"{lease.parent} is not one directory for all ranks",
        have=f"rank {layout.rank} does not see there what rank 0 has written",
        want="checkpoints that all ranks share, or a mirror where disks that they do not share can meet",
        do="set output_dir to a directory that all ranks share, or checkpoint.mirror to a URL that all reach",
    )


def _number(lease: Path, wanted: Collection[int | None], pauses: Sequence[float]) -> int | None:
    """Return which of these numbers the lease carries here; None if it shows none in time."""
    for pause in pauses:
        time.sleep(pause)
        for directory in reversed(lease.parents[:3]):
            with suppress(OSError):  # has a network mount look again at what names there are
                os.listdir(directory)
        number = Token(lease, 0).current()
        if isinstance(number, int) and number in wanted:
            return number
    return None
