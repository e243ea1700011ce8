"""Committing a step and letting older ones go, as one value that can be sent to the process that does it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from burnish.checkpoint.contents import Contents
from burnish.checkpoint.destinations.disks import Disks
from burnish.checkpoint.destinations.partial_checkpoints import portion_paths
from burnish.checkpoint.planner import Planner
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.room import require_room
from burnish.checkpoint.save import save_step
from burnish.checkpoint.steps import INFLIGHT, PORTION, TRASH, open_step, step_name
from burnish.distributed.collectives import agree
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError
from burnish.files.durable import discard
from burnish.files.lease import Token
from burnish.files.removals import NotRemovedError, Removals
from burnish.files.storage import Storage


@dataclass(frozen=True, slots=True)
class Saved:
    """A step that is committed."""

    path: Path
    """Its directory, or that of this rank's portion of it."""
    warning: NotRemovedError | None
    """Rank 0: what could not be removed beside it; None where all could."""


@dataclass(frozen=True, slots=True)
class Saver:
    """Where steps are saved, by whom, and which of them stay."""

    root: Path
    """The run's `checkpoints/`."""
    planner: Planner = field(compare=False, repr=False)
    """Who writes what, and where to; it keeps the plan from save to save, in each process that has this."""
    storage: Storage
    """The disk."""
    retention: Retention
    """Which steps stay."""
    reserve_bytes: int
    """What stays free on the disk."""
    token: Token | None = None
    """The leader of a disk: the right to commit below `root`."""

    @property
    def layout(self) -> Layout:
        """This process among those that save together."""
        return self.planner.layout

    @property
    def disks(self) -> Disks:
        """Where these write to."""
        return self.planner.disks

    def save(self, step: int, contents: Contents, fence: Callable[[], None] | None = None) -> Saved:
        """Commit a step and remove those that need no longer be kept. Collective.

        An error on any rank is raised on every rank and leaves earlier steps untouched. `fence`
        is called on the leader of each disk before the step is sealed; what it raises keeps the step from existing.
        """

        def check() -> None:
            if self.token is not None:
                self.token.check()
            if fence is not None:
                fence()

        def require(needed: int) -> None:
            waiting = partial(self.retention.waiting, self.root, self.storage)
            require_room(self.root, step, needed, self.reserve_bytes, self.storage, waiting)

        path = save_step(self.root, step, contents, self.planner, self.storage, require, check)
        with agree(self.layout):
            return Saved(path, self.let_go() if self.layout.is_main else None)

    @property
    def leads(self) -> bool:
        """Whether this rank makes and names what is on its disk."""
        return self.layout.rank in self.disks.leaders

    def holds(self, step: int) -> bool:
        """Whether this rank's disk has the step, or its portion, sealed."""
        if self.disks.are_several:
            return step in portion_paths(self.root, self.storage).values()
        with suppress(CorruptError):
            return bool(open_step(self.root / step_name(step), self.storage))
        return False

    def discard(self, step: int, *, portion: bool) -> NotRemovedError | None:
        """Remove what a save that ended has left of a step, and its `portion` too; says what could not be removed. For leaders."""
        starts = (INFLIGHT, PORTION) if portion else (INFLIGHT,)
        removals = Removals(self.root)
        with removals.trying():
            for entry in self.storage.entries(self.root):
                if entry.name.startswith(tuple(f"{start}{step:08d}." for start in starts)):
                    discard(self.storage, self.root / entry.name, self.root / TRASH)
        return removals.error()

    def let_go(self) -> NotRemovedError | None:
        """Remove the steps that need no longer be kept; says what could not be removed. For rank 0."""
        try:
            self.retention.apply(self.root, self.storage)
        except NotRemovedError as error:
            return error
        return None
