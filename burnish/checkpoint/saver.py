"""Committing a step and letting older ones go, as one value that can be sent to the process that does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from burnish.checkpoint.committed import read_commit
from burnish.checkpoint.contents import Contents
from burnish.checkpoint.planner import Planner
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import save_step
from burnish.files.durable import naming_failures
from burnish.files.lease import Token
from burnish.files.storage import Storage
from burnish.parallel.collectives import agree
from burnish.parallel.layout import Layout


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

    def save(self, step: int, contents: Contents, fence: Callable[[], None] | None = None) -> Path:
        """Commit a step and remove those that need no longer be kept; returns its directory. Collective.

        An error on any rank is raised on every rank and leaves earlier steps untouched. `fence`
        is called on rank 0 before the step is sealed; what it raises keeps the step from existing.
        """

        def check() -> None:
            if self.token is not None:
                self.token.check()
            if fence is not None:
                fence()

        path = save_step(
            self.root, step, contents, self.planner, self.storage, self.reserve_bytes, check
        )
        failed = f"step {step} is committed, but older steps could not be removed"
        with agree(self.layout), naming_failures(failed):
            if self.layout.is_main:
                room = read_commit(path, self.storage).total_bytes + self.reserve_bytes
                self.retention.apply(self.root, self.storage, room)
        return path
