"""A run's `checkpoints/`: opened by one run at a time, saved into, resumed from.

All ranks need the same directory: each of them must see the lease that rank 0 takes.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from burnish.checkpoint.manifest import AHEAD
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import Contents, Saver
from burnish.checkpoint.steps import (
    QUARANTINE,
    CommittedStep,
    clear,
    open_step,
    require_healthy,
    small_files,
    step_paths,
    verify_files,
)
from burnish.config.resume import RunIdentity
from burnish.distributed.collectives import agree, from_main, gather_objects, same_on_all_ranks
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, UsageError, few
from burnish.files.durable import Removals, make_dirs_durably, move_aside, naming_failures
from burnish.files.lease import LEASE, LeaseToken, holding_lease
from burnish.files.storage import LOCAL, LocalStorage, Source
from burnish.tracking.rundir import RunDirectory

if TYPE_CHECKING:
    from burnish.checkpoint.background import BackgroundSaver, Finished
    from burnish.checkpoint.load import CheckpointSource

# Parents of `checkpoints/` to sync, because the run may have made them: its own directory, that of all runs, and the next.
_OWN_LEVELS = 3
# Seconds to wait for a save in flight when a run ends with an error.
_PATIENCE_SECONDS = 30.0

# Seconds before each look at the lease.
_PAUSES = (0.0, 0.1, 0.3, 1.0)
# An NFS client may remember for 60 seconds that a file was missing.
_PAUSES_BETWEEN_MACHINES = (*_PAUSES, 3.0, 10.0, 20.0, 40.0)

_log = logging.getLogger(__name__)

Load: TypeAlias = "Callable[[CommittedStep, CheckpointSource], None]"
"""Fills the engine from a step; it may be called again with an older one."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The step that a run continues from."""

    step: CommittedStep
    skipped: tuple[str, ...]
    """Why each newer step was skipped, newest first."""


class Destination(Protocol):
    """This rank's access to the copy of a run behind a URL."""

    @property
    def root(self) -> PurePath:
        """The directory of steps."""

    @property
    def source(self) -> Source:
        """The reader of `root`."""

    sharing: str
    """Advice for a rank that does not see the steps that rank 0 sees."""
    url: str
    """URL of the copy of the run's directory."""

    def begin(self) -> None:
        """Start copying new files and steps."""

    def hear(self) -> bool:
        """Log the results of copying; return whether it still runs."""

    def settle(
        self, seconds: float, stopped: Callable[[], bool], show: Callable[[float], None]
    ) -> BurnishError | None:
        """Copy once more and wait; return why the copy is incomplete. `show` gets fractions of 1. Collective."""

    def paths(self) -> Mapping[int, PurePath]:
        """Return the steps, by number."""

    def set_aside(self, path: PurePath, error: CorruptError) -> str:
        """Hide a step from resuming; return where it is."""

    def aside(self) -> list[str]:
        """Return the steps ever set aside."""

    def require_own(self, directory: RunDirectory, run: RunIdentity) -> dict[str, str]:
        """Return the copy's part of environment.json. Raises if the copy is another run's."""

    def claim(self, directory: RunDirectory) -> None:
        """Make this start the copy's owner."""

    def bring_back(self, directory: RunDirectory) -> None:
        """Fetch metrics, pins and outputs that the directory lacks."""

    def close(self) -> None:
        """Stop copying at once."""


class LocalState:
    """The steps of a `checkpoints/`, with the reading members of `Destination`."""

    sharing = "set output_dir to a directory that all ranks share"

    def __init__(self, root: Path, storage: LocalStorage) -> None:
        self.root = root
        self.source = storage

    def paths(self) -> Mapping[int, PurePath]:
        """Return everything with a step's name."""
        return step_paths(self.root, self.source)

    def set_aside(self, path: PurePath, error: CorruptError) -> str:
        """Move a step into `quarantine/`; return its place."""
        return str(move_aside(self.source, Path(path), self.root / QUARANTINE))

    def aside(self) -> list[str]:
        """Return the content of `quarantine/`."""
        quarantine = self.root / QUARANTINE
        return [str(quarantine / entry.name) for entry in self.source.entries(quarantine)]


Side = LocalState | Destination
"""A place where steps may lie."""


class Checkpoints:
    """The directory, held exclusively inside the block. All methods are collective.

    Entering removes what a killed run left. Raises `BurnishError` if another run holds the directory, and `UsageError` if ranks see
    different directories. `background_timeout`, in seconds, gives every rank a writer process.
    """

    def __init__(
        self,
        root: Path,
        layout: Layout,
        *,
        retention: Retention | None = None,
        reserve_bytes: int = 0,
        background_timeout: float | None = None,
        storage: LocalStorage = LOCAL,
    ) -> None:
        self._root = root
        self._layout = layout
        self._storage = storage
        self._retention = retention or Retention()
        self._saver = Saver(root, layout, self._storage, self._retention, reserve_bytes)
        self._background_timeout = background_timeout
        self._background: BackgroundSaver | None = None
        self._mirror: Destination | None = None
        self._lease = ExitStack()

    def __enter__(self) -> Self:
        layout = self._layout
        try:
            with agree(layout):
                if layout.is_main:
                    self._take()
            is_mirrored = self._retention.mirror is not None
            _require_shared(self._root / LEASE, self._saver.token, layout, is_mirrored=is_mirrored)
            with agree(layout), naming_failures(f"{self._root} cannot be used"):
                if self._background_timeout is not None:
                    from burnish.checkpoint.background import BackgroundSaver

                    # The writer process keeps the lock too: it may still write when its rank is killed.
                    token = self._saver.token
                    lock = (token.descriptor,) if token is not None else ()
                    self._background = BackgroundSaver(self._saver, self._background_timeout, lock)
        except BaseException:
            self._close()
            raise
        return self

    def _take(self) -> None:
        """Take the lease, and remove what a killed run left. For rank 0."""
        with naming_failures(f"{self._root} cannot be used"):
            make_dirs_durably(self._storage, self._root, above=_OWN_LEVELS)
            token = self._lease.enter_context(holding_lease(self._root / LEASE))
            self._saver = replace(self._saver, token=token)
            removals = Removals(self._root)
            clear(self._root, self._storage, removals)
            _log_failed_removals(removals.error())

    def __exit__(self, *error: object) -> None:
        self._close(_PATIENCE_SECONDS)

    def _close(self, patience_seconds: float = 0.0) -> None:
        if self._background is not None:
            self._background.close(patience_seconds)
            self._background = None
        if self._mirror is not None:
            self._mirror.close()
        self._lease.close()

    def save(self, step: int, contents: Contents) -> Path:
        """Commit a step, remove those that retention drops, and return its directory.

        An error is raised on all ranks and leaves earlier steps unchanged.
        """
        saved = self._saver.save(step, contents)
        if saved.warning is not None:
            _log.error("step %d is committed, but %s", step, saved.warning)
        if self._mirror is not None:
            self._mirror.begin()
        return saved.path

    def begin_save(self, step: int, contents: Contents) -> None:
        """Start committing a step in the background; the contents may change when this returns.

        Raises errors in copying, and `ValueError` without `background_timeout`. Call `finished` before any next save.
        """
        if self._background is None:
            raise ValueError("these checkpoints have no process to save in the background")
        self._background.begin(step, contents)

    def finished(self, *, wait: bool) -> Finished | None:
        """Return the background save's outcome, once; None while it runs or without one."""
        finished = None if self._background is None else self._background.finished(wait=wait)
        if self._mirror is not None:
            if finished is not None and finished.error is None:
                self._mirror.begin()
            else:
                self._mirror.hear()
        return finished

    def mirror_to(self, mirror: Destination | None) -> None:
        """Resume from this mirror too, and sync it after saves."""
        self._mirror = mirror

    def settle_mirror(
        self, seconds: float, stopped: Callable[[], bool], show: Callable[[float], None]
    ) -> BurnishError | None:
        """Settle the mirror; return why it is not in sync. Remove the steps that waited for it."""
        if self._mirror is None:
            return None
        problem = self._mirror.settle(seconds, stopped, show)
        with agree(self._layout), naming_failures(f"{self._root} cannot be cleared"):
            if self._layout.is_main:
                _log_failed_removals(self._saver.let_go())
        return problem

    def resume(self, load: Load, arena: Arena | None = None) -> Resumed | None:
        """Load the newest usable step of disk and mirror; None if nothing was ever committed.

        A step that is unhealthy, or damaged on any rank, is set aside. Raises `CorruptError` if no step is usable. Other errors
        leave the step in place.
        """
        here = LocalState(self._root, self._storage)
        sides: list[Side] = [here] if self._mirror is None else [here, self._mirror]
        skipped: list[str] = []
        while (newest := _newest(sides, self._layout)) is not None:
            side_index, path = newest
            side = sides[side_index]
            try:
                step = _open(side, path, self._layout)
                with agree(self._layout), naming_failures(f"{path} cannot be read"):
                    if self._layout.is_main:
                        _log_resuming(step, skipped)
                        assets = [name for name in small_files(step) if not name.startswith(AHEAD)]
                        for damage in verify_files(step, assets):
                            _log.warning("the run goes on without it, but %s", damage)
                from burnish.checkpoint.load import CheckpointSource

                load(step, CheckpointSource(step, self._layout, arena))
            except CorruptError as error:
                skipped.append(str(error))
                with agree(self._layout), naming_failures(f"{path} cannot be set aside"):
                    if self._layout.is_main:
                        _log.warning("moved to %s: %s", side.set_aside(path, error), error)
            else:
                return Resumed(step, tuple(skipped))
        with agree(self._layout):
            aside = [path for side in sides for path in side.aside()]
        if aside := from_main(aside, self._layout):
            raise CorruptError(
                f"no checkpoint in {' and '.join(str(side.root) for side in sides)} can be used",
                have="\n".join(skipped) or ", ".join(aside),
                want="one that is whole and healthy",
                do=f"look into {', '.join(aside)}; remove it to start from the beginning",
            )
        return None


def _log_failed_removals(error: BurnishError | None) -> None:
    if error is not None:
        _log.error("%s", error)


def _require_shared(
    lease: Path, token: LeaseToken | None, layout: Layout, *, is_mirrored: bool
) -> None:
    """Raise `UsageError` unless all ranks see the lease of rank 0's `token`. Collective."""
    number = from_main(None if token is None else token.number, layout)
    pauses = _PAUSES if layout.local_world == layout.world else _PAUSES_BETWEEN_MACHINES
    blind_host = None if _sees(lease, number, pauses) else socket.gethostname()
    hosts = gather_objects(blind_host, layout)
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host is not None]
    if not blind:
        return
    do = "set output_dir to a directory on a disk that all machines share"
    if is_mirrored:
        do += ", and checkpoint.mirror to the URL of its copy"
    with agree(layout):
        if layout.is_main:  # one rank raises it, so that it is printed once
            raise UsageError(
                f"{lease.parent.absolute()} is not the same directory for all ranks",
                have=f"rank 0 on {socket.gethostname()} wrote a file there; {few(blind)} cannot see it",
                want="one directory that every rank reads and writes",
                do=do,
            )


def _sees(lease: Path, number: int | None, pauses: Sequence[float]) -> bool:
    for pause in pauses:
        time.sleep(pause)
        for directory in reversed(lease.parents[:3]):
            with suppress(OSError):  # makes a network mount read the names again
                os.listdir(directory)
        if LeaseToken(lease, 0).current() == number:
            return True
    return False


def _newest(sides: Sequence[Side], layout: Layout) -> tuple[int, PurePath] | None:
    """Return the newest step's side and path; of equal steps, that of the first side. Collective."""
    steps: list[tuple[int, int, PurePath]] = []
    with agree(layout):
        for index, side in enumerate(sides if layout.is_main else ()):
            with naming_failures(f"{side.root} cannot be read"):
                steps += [(step, -index, path) for step, path in side.paths().items()]
    newest = max(steps, default=None)
    return from_main(None if newest is None else (-newest[1], newest[2]), layout)


def _open(side: Side, path: PurePath, layout: Layout) -> CommittedStep:
    """Open a step, or raise `CorruptError` on every rank. Collective."""
    with agree(layout), naming_failures(f"{path} cannot be read"):
        if side.source.kind(path) is None:  # it lies on another machine and is not damaged
            raise BurnishError(
                f"{path} is not there for every rank",
                have=f"rank {layout.rank} does not see what rank 0 sees",
                want="checkpoints that all ranks share",
                do=side.sharing,
            )
        step = open_step(path, side.source)
        require_healthy(step)
    same_on_all_ranks(step.commit.encode(), f"the content of {path}", layout)
    return step


def _log_resuming(step: CommittedStep, skipped: Sequence[str]) -> None:
    reasons = "; ".join(reason.partition("\n")[0] for reason in skipped)
    _log.log(
        logging.WARNING if skipped else logging.INFO,
        "resuming step %d from %s%s",
        step.step,
        step.path,
        reasons and f"; skipped: {reasons}",
    )
