"""A run's `checkpoints/`: opened by one run at a time, saved into, resumed from, kept in bounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from burnish.checkpoint.background import BackgroundSaver, Finished
from burnish.checkpoint.committed import (
    QUARANTINE,
    Committed,
    open_step,
    step_paths,
)
from burnish.checkpoint.contents import Contents
from burnish.checkpoint.leftovers import clear
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.saver import Saver
from burnish.errors import BurnishError, CorruptError
from burnish.files.durable import make_dirs_durably, move_aside, naming_failures
from burnish.files.lease import Lease
from burnish.files.storage import LocalStorage, Storage
from burnish.parallel.collectives import agree, gather_objects, same_on_all_ranks
from burnish.parallel.layout import Layout

_OWN_LEVELS = 3
# The run's directory, that of all runs, and the one that holds it: the run may have made the former.
_PATIENCE_SECONDS = 30.0
# For a save in flight when a run ends with an error.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run continues from."""

    step: Committed
    """The step that was loaded."""
    skipped: tuple[str, ...]
    """Why newer steps were not: one text each, newest first."""


class Checkpoints:
    """The directory, held exclusively from entering to leaving the block. All methods are collective.

    `retention` says which steps are kept; `reserve_bytes` of the disk stay free. Entering clears
    what a killed run left half written; raises `BurnishError` when another run holds the directory.
    With `background_timeout`, in seconds, every rank has a process beside it for `begin_save`, and
    these wait so long for each other.
    """

    def __init__(
        self,
        root: Path,
        layout: Layout,
        *,
        retention: Retention | None = None,
        reserve_bytes: int = 0,
        background_timeout: float | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._root = root
        self._layout = layout
        self._storage = storage or LocalStorage()
        self._saver = Saver(root, layout, self._storage, retention or Retention(), reserve_bytes)
        self._background_timeout = background_timeout
        self._background: BackgroundSaver | None = None
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Take the lease and clear leftovers."""
        held: tuple[int, ...] = ()
        try:
            with agree(self._layout), naming_failures(f"{self._root} cannot be used"):
                if self._layout.is_main:
                    make_dirs_durably(self._storage, self._root, above=_OWN_LEVELS)
                    lease = self._held.enter_context(Lease(self._root / ".lease"))
                    self._saver = replace(self._saver, token=lease.token)
                    clear(self._root, self._storage)
                    held = (lease.fileno(),)
                if self._background_timeout is not None:
                    self._background = BackgroundSaver(self._saver, self._background_timeout, held)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the lease back, after a while for a save in flight."""
        self._close(_PATIENCE_SECONDS)

    def _close(self, patience_seconds: float = 0.0) -> None:
        if self._background is not None:
            self._background.close(patience_seconds)
            self._background = None
        self._held.close()

    def save(self, step: int, contents: Contents) -> Path:
        """Commit a step and remove those that need no longer be kept; returns its directory.

        An error on any rank is raised on every rank and leaves earlier steps untouched. Whoever
        uses `begin_save` asks `finished(wait=True)` first.
        """
        return self._saver.save(step, contents)

    def begin_save(self, step: int, contents: Contents) -> None:
        """Have a step committed while training goes on; returns when the contents may change.

        An error in copying is raised on every rank; how the rest went is told by `finished`, which
        has to be asked before the next save. Raises `ValueError` without a `background_timeout`.
        """
        if self._background is None:
            raise ValueError("these checkpoints have no process to save in the background")
        self._background.begin(step, contents)

    def finished(self, *, wait: bool) -> Finished | None:
        """How the save in the background went, the same on every rank, once; None while it is under way, or when there is none."""
        return None if self._background is None else self._background.finished(wait=wait)

    def resume(self, load: Callable[[Committed, CheckpointSource], None]) -> Resumed | None:
        """Load the newest step that can be; None when nothing was ever committed here.

        `load` fills the engine from the source, which checks what it reads; it may be called again
        with an older step. A damaged step is moved to `quarantine/`, and so is an unhealthy one,
        which is not loaded. Raises `CorruptError` when there are steps and none of them can be
        used; other errors of `load` pass through and leave the step where it is.
        """
        skipped: list[str] = []
        while (path := self._newest()) is not None:
            try:
                step = self._open(path)
                load(step, CheckpointSource(step, self._layout, self._storage))
            except CorruptError as error:
                skipped.append(str(error))
                self._quarantine(path, error)
            else:
                return Resumed(step, tuple(skipped))
        aside = self._storage.entries(self._root / QUARANTINE)
        if aside:
            raise CorruptError(
                f"no checkpoint in {self._root} can be used",
                have="\n".join(skipped) or ", ".join(entry.name for entry in aside),
                want="one that is whole and healthy",
                do=f"look into {self._root / QUARANTINE}; remove it to start from the beginning",
            )
        return None

    def _newest(self) -> Path | None:
        """The path of the newest step by name, as rank 0 sees it."""
        with agree(self._layout), naming_failures(f"{self._root} cannot be read"):
            paths = list(step_paths(self._root, self._storage).values())
        return gather_objects(paths[-1] if paths else None, self._layout)[0]

    def _open(self, path: Path) -> Committed:
        """The step at `path`, the same on every rank. Raises `CorruptError` when any rank cannot use it."""
        with agree(self._layout), naming_failures(f"{path} cannot be read"):
            self._check_shared(path)
            step = open_step(path, self._storage)
            if not step.healthy:
                raise CorruptError(
                    f"{path} is marked unhealthy",
                    have="a loss or weights that are not finite",
                    want="a step that training can continue from",
                )
        same_on_all_ranks(step.commit.encode(), f"what lies in {path}", self._layout)
        return step

    def _check_shared(self, path: Path) -> None:
        """A step that rank 0 has found and this rank does not see is not damaged: it lies on another machine."""
        if not any(entry.name == path.name for entry in self._storage.entries(path.parent)):
            raise BurnishError(
                f"{path} is not there for every rank",
                have=f"rank {self._layout.rank} does not see what rank 0 sees",
                want="checkpoints on a file system that all ranks share",
                do="set output_dir to a shared directory",
            )

    def _quarantine(self, path: Path, error: CorruptError) -> None:
        with agree(self._layout), naming_failures(f"{path} cannot be moved to {QUARANTINE}"):
            if self._layout.is_main:
                aside = move_aside(self._storage, path, self._root / QUARANTINE)
                _log.warning("moved to %s: %s", aside, error)
