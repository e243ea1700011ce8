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

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.steps import (
    QUARANTINE,
    Committed,
    open_step,
    require_healthy,
    step_paths,
)
from burnish.config.schema import RunConfig
from burnish.distributed.collectives import agree, gather_objects, same_on_all_ranks
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError
from burnish.files.durable import move_aside, naming_failures
from burnish.files.storage import LocalStorage, Source
from burnish.tracking.rundir import RunDirectory

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


class Destination(Side, Protocol):
    """A copy of the run behind a URL, on this rank. A run that sets one loads `burnish.checkpoint.destinations` by name."""

    url: str
    """Of the copy of the run's directory."""

    def lead(self, disk: int | None) -> None:
        """Copy this rank's disk from now on: one of several that meet there, or the only one (None)."""

    def begin(self) -> None:
        """Ask for a copy of what is new. Returns at once."""

    def hear(self) -> bool:
        """Take and log the news of copying; return whether it is under way."""

    def settle(
        self, seconds: float, stopped: Callable[[], bool], show: Callable[[float], None]
    ) -> BurnishError | None:
        """Copy once more and wait for it; return why the copy lacks something. Shows parts of 1. Collective."""

    def meet(self, here: Side, *, leads: bool) -> None:
        """Before resuming on several disks: refuse steps that only one disk has, and clear what no disk committed. Collective."""

    def require_own(
        self, directory: RunDirectory, config: RunConfig, trainer: str
    ) -> dict[str, str]:
        """Return what the copy adds to the directory's environment.json. Raises if it is another run's, and changes nothing."""

    def claim(self, directory: RunDirectory) -> None:
        """Make the copy this start's."""

    def bring_back(self, directory: RunDirectory) -> None:
        """Fetch metrics and pins that are not in the directory."""

    def close(self) -> None:
        """Stop copying, whatever is under way."""


class OnDisk:
    """A run's `checkpoints/`."""

    sharing = "set output_dir to a directory that all ranks share"

    def __init__(self, root: Path, storage: LocalStorage) -> None:
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
