"""Find the step to continue from: the newest usable one, on this disk or the mirror.

Every rank opens a step. If any finds it damaged, it is set aside for all, and the next older one on either side is tried. Of a
step that both sides have, the disk's comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

from burnish.checkpoint.destinations.mirror import Mirror
from burnish.checkpoint.destinations.remote_steps import DAMAGED
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.steps import (
    QUARANTINE,
    Committed,
    open_step,
    require_healthy,
    step_paths,
)
from burnish.distributed.collectives import agree, from_main, gather_objects, same_on_all_ranks
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, IncompatibleError, UsageError
from burnish.files.durable import move_aside, naming_failures
from burnish.files.storage import Source, Storage

_log = logging.getLogger(__name__)

Load = Callable[[Committed, CheckpointSource], None]
"""Fills the engine from a step; it may be called again with an older one."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run continues from."""

    step: Committed
    """The step that was loaded."""
    skipped: tuple[str, ...]
    """Why newer steps were not: one text each, newest first."""


class Side(Protocol):
    """A place where steps may lie."""

    @property
    def root(self) -> PurePath:
        """The directory of steps."""

    @property
    def source(self) -> Source:
        """Reads what is below."""

    sharing: str
    """What to do where a rank does not see what rank 0 does."""

    def paths(self) -> Mapping[int, PurePath]:
        """The steps, as they are at this moment."""

    def set_aside(self, path: PurePath, error: CorruptError) -> str:
        """Take a step out of sight, for people to look into; says where it is."""

    def aside(self) -> list[str]:
        """What was set aside, now or earlier."""


class OnDisk:
    """A run's `checkpoints/`."""

    sharing = "set output_dir to a directory that all ranks share"

    def __init__(self, root: Path, storage: Storage) -> None:
        self.root = root
        self.source = storage

    def paths(self) -> Mapping[int, PurePath]:
        """What has a step's name."""
        return step_paths(self.root, self.source)

    def set_aside(self, path: PurePath, error: CorruptError) -> str:
        """By a rename into `quarantine/`."""
        return str(move_aside(self.source, Path(path), self.root / QUARANTINE))

    def aside(self) -> list[str]:
        """The content of `quarantine/`."""
        quarantine = self.root / QUARANTINE
        return [str(quarantine / entry.name) for entry in self.source.entries(quarantine)]


class OnMirror:
    """The mirror of one."""

    sharing = "see that nobody removes steps there, and that all ranks reach one service"

    def __init__(self, mirror: Mirror) -> None:
        self.source = mirror.steps()
        self.root = self.source.root
        self._check = mirror.check

    def paths(self) -> Mapping[int, PurePath]:
        """What has a COMMIT."""
        self.source.refresh()
        return step_paths(self.root, self.source)

    def set_aside(self, path: PurePath, error: CorruptError) -> str:
        """By another seal: COMMIT goes, and a file says why."""
        self._check()
        self.source.mark_damaged(path, str(error))
        return f"{path / DAMAGED}"

    def check_seen(self, rank: int) -> None:
        """Raise `UsageError` if this rank does not see what rank 0 wrote there at the start."""
        try:
            self._check()
        except IncompatibleError as error:
            raise UsageError(
                f"{self.root} is not one place for all ranks",
                have=f"rank {rank} finds {error.have}",
                want=error.want,
                do="set checkpoint.mirror to a URL that is the same place for all machines",
            ) from error

    def aside(self) -> list[str]:
        """The steps with that file."""
        return [str(self.root / name / DAMAGED) for name in self.source.damaged()]


def require_meeting(here: OnDisk, there: OnMirror, layout: Layout, *, leads: bool) -> None:
    """Refuse a mirror that some disk does not see, and a whole step on one disk that is newer than all of the mirror's. Collective.

    `leads` is true on the rank that speaks for its disk.
    """
    found = -1
    with agree(layout), naming_failures(f"{there.root} cannot be read"):
        if leads:
            there.check_seen(layout.rank)
        if layout.is_main:
            found = max(there.paths(), default=-1)
    newest = from_main(found, layout)
    with agree(layout), naming_failures(f"{here.root} cannot be read"):
        paths = here.paths() if leads else {}
        if paths and max(paths) > newest:
            raise UsageError(
                f"{paths[max(paths)]} is on a disk that not all ranks share, and not on {there.root}",
                have=f"step {newest} as the newest there" if newest >= 0 else "no step there",
                want="all steps where the disks meet",
                do="start the command on that machine alone until the mirror has the step, or move the step away",
            )


class Resuming:
    """One search for a step to continue from, with memory from `arena` if there is one. Collective."""

    def __init__(self, sides: Sequence[Side], layout: Layout, arena: Arena | None = None) -> None:
        self._sides = sides
        self._layout = layout
        self._arena = arena

    def resume(self, load: Load) -> Resumed | None:
        """Load the newest usable step; return None if nothing was ever committed.

        Damaged and unhealthy steps are set aside. Raises `CorruptError` if there are steps and none is usable. Other errors of `load`,
        and a side that cannot be reached, pass through and leave the step in place.
        """
        skipped: list[str] = []
        while (found := self._newest()) is not None:
            side, path = self._sides[found[0]], found[1]
            try:
                step = self._open(side, path)
                self._say(step, skipped)
                load(step, CheckpointSource(step, self._layout, side.source, self._arena))
            except CorruptError as error:
                skipped.append(str(error))
                self._set_aside(side, path, error)
            else:
                return Resumed(step, tuple(skipped))
        aside = self._aside()
        if aside:
            places = " and ".join(str(side.root) for side in self._sides)
            raise CorruptError(
                f"no checkpoint in {places} can be used",
                have="\n".join(skipped) or ", ".join(aside),
                want="one that is whole and healthy",
                do=f"look into {', '.join(aside)}; remove it to start from the beginning",
            )
        return None

    def _say(self, step: Committed, skipped: Sequence[str]) -> None:
        """Say before loading which step it is, and which newer ones are not used."""
        if self._layout.is_main:
            reasons = "; ".join(each.partition("\n")[0] for each in skipped)
            _log.log(
                logging.WARNING if skipped else logging.INFO,
                "resuming step %d from %s%s",
                step.step,
                step.path,
                reasons and f"; skipped: {reasons}",
            )

    def _newest(self) -> tuple[int, PurePath] | None:
        """The side and path of the newest step by name, as rank 0 sees them."""
        found: list[tuple[int, int, PurePath]] = []
        with agree(self._layout):
            for index, side in enumerate(self._sides if self._layout.is_main else ()):
                with naming_failures(f"{side.root} cannot be read"):
                    found += [(step, -index, path) for step, path in side.paths().items()]
        newest = max(found, default=None)
        mine = None if newest is None else (-newest[1], newest[2])
        return gather_objects(mine, self._layout)[0]

    def _open(self, side: Side, path: PurePath) -> Committed:
        """Open the step at `path` on every rank. Raises `CorruptError` if any rank cannot use it."""
        with agree(self._layout), naming_failures(f"{path} cannot be read"):
            self._check_shared(side, path)
            step = open_step(path, side.source)
            require_healthy(step)
        same_on_all_ranks(step.commit.encode(), f"what lies in {path}", self._layout)
        return step

    def _check_shared(self, side: Side, path: PurePath) -> None:
        """Raise if rank 0 found a step that this rank does not see: it lies on another machine and is not damaged."""
        if side.source.kind(path) is None:
            raise BurnishError(
                f"{path} is not there for every rank",
                have=f"rank {self._layout.rank} does not see what rank 0 sees",
                want="checkpoints that all ranks share",
                do=side.sharing,
            )

    def _set_aside(self, side: Side, path: PurePath, error: CorruptError) -> None:
        with agree(self._layout), naming_failures(f"{path} cannot be set aside"):
            if self._layout.is_main:
                _log.warning("moved to %s: %s", side.set_aside(path, error), error)

    def _aside(self) -> list[str]:
        with agree(self._layout):
            found = [each for side in self._sides for each in side.aside()]
        return gather_objects(found, self._layout)[0]
