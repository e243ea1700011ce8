"""Committing a step and letting older ones go, as one value that can be sent to the process that does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from burnish.checkpoint.contents import Contents
from burnish.checkpoint.planner import Planner
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.room import require_room
from burnish.checkpoint.save import save_step
from burnish.files.lease import Token
from burnish.files.removals import NotRemovedError
from burnish.files.storage import Storage
from burnish.parallel.collectives import agree
from burnish.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Saved:
    """A step that is committed."""

    path: Path
    """Its directory."""
    warning: NotRemovedError | None
    """Rank 0: what could not be removed beside it; None where all could."""


@dataclass(frozen=True, slots=True)
class Saver:
    """Where steps are saved, by whom, and which of them stay."""

    root: Path
    """The run's `checkpoints/`."""
    layout: Layout
    """This process among those that save together."""
    storage: Storage
    """The disk."""
    retention: Retention
    """Which steps stay."""
    reserve_bytes: int
    """What stays free on the disk."""
    token: Token | None = None
    """Rank 0: the right to commit below `root`."""
    planner: Planner = field(init=False, compare=False, repr=False)
    """Keeps the plan from save to save, in each process that has this."""

    def __post_init__(self) -> None:
        """Begin without a plan."""
        object.__setattr__(self, "planner", Planner(self.layout))

    def save(self, step: int, contents: Contents, fence: Callable[[], None] | None = None) -> Saved:
        """Commit a step and remove those that need no longer be kept. Collective.

        An error on any rank is raised on every rank and leaves earlier steps untouched. `fence`
        is called on rank 0 before the step is sealed; what it raises keeps the step from existing.
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

    def let_go(self) -> NotRemovedError | None:
        """Remove the steps that need no longer be kept; says what could not be removed. For rank 0."""
        try:
            self.retention.apply(self.root, self.storage)
        except NotRemovedError as error:
            return error
        return None
