"""A run's `checkpoints/`: opened by one run at a time, saved into, resumed from, kept in bounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from burnish.checkpoint.background import BackgroundSaver, Finished
from burnish.checkpoint.disks import find_disks
from burnish.checkpoint.resume import Destination, Load, OnDisk, Resumed, Resuming, Side
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import Contents, Saver
from burnish.checkpoint.steps import clear
from burnish.checkpoint.writer import SavePlanner
from burnish.distributed.collectives import agree
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.durable import Removals, make_dirs_durably, naming_failures
from burnish.files.lease import Lease, Token
from burnish.files.storage import LocalStorage

_LEASE = ".lease"
_OWN_LEVELS = 3
# The run's directory, that of all runs, and the one that holds it: the run may have made the former.
_PATIENCE_SECONDS = 30.0
# For a save in flight when a run ends with an error.

_log = logging.getLogger(__name__)


class Checkpoints:
    """The directory, held exclusively inside the block. All methods are collective.

    `retention` decides which steps stay; `reserve_bytes` of the disk stay free. Entering clears what a killed run left half
    written. Raises `BurnishError` if another run holds the directory, or if ranks see different directories and no mirror joins
    them. With a mirror, each disk gets a part of a step, which is committed on the mirror; see `meets_on_mirror`. With
    `background_timeout`, in seconds, every rank has a writer process for `begin_save`, and these wait so long for each other.
    """

    def __init__(
        self,
        root: Path,
        layout: Layout,
        *,
        retention: Retention | None = None,
        reserve_bytes: int = 0,
        background_timeout: float | None = None,
        storage: LocalStorage | None = None,
    ) -> None:
        self._root = root
        self._layout = layout
        self._storage = storage or LocalStorage()
        self._retention = retention or Retention()
        self._saver = Saver(
            root, SavePlanner(layout), self._storage, self._retention, reserve_bytes
        )
        self._background_timeout = background_timeout
        self._background: BackgroundSaver | None = None
        self._mirror: Destination | None = None
        self._lease: Lease | None = None
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Take the lease and clear leftovers, on each disk."""
        lease = self._root / _LEASE
        try:
            token = None
            with agree(self._layout):
                if self._layout.is_main:
                    token = self._take(lease)
            meets = self._retention.mirror is not None
            disks = find_disks(
                lease, token, lambda: self._take(lease), self._layout, may_differ=meets
            )
            self._saver = replace(self._saver, planner=SavePlanner(self._layout, disks))
            with agree(self._layout), naming_failures(f"{self._root} cannot be used"):
                if self._background_timeout is not None:
                    held = (self._lease.fileno(),) if self._lease is not None else ()
                    self._background = BackgroundSaver(self._saver, self._background_timeout, held)
        except BaseException:
            self._close()
            raise
        return self

    def _take(self, path: Path) -> Token:
        """Have this disk for this run alone, and free of leftovers."""
        with naming_failures(f"{self._root} cannot be used"):
            make_dirs_durably(self._storage, self._root, above=_OWN_LEVELS)
            self._lease = self._held.enter_context(Lease(path))
            self._saver = replace(self._saver, token=self._lease.token)
            self._clear()
            return self._lease.token

    @property
    def meets_on_mirror(self) -> bool:
        """Whether ranks have several disks, so that only the mirror holds whole steps."""
        return self._saver.disks.are_several

    def _clear(self) -> None:
        removals = Removals(self._root)
        clear(self._root, self._storage, removals)
        if (left := removals.error()) is not None:
            _log.error("%s", left)

    def __exit__(self, *error: object) -> None:
        """Give the lease back, after a while for a save in flight."""
        self._close(_PATIENCE_SECONDS)

    def _close(self, patience_seconds: float = 0.0) -> None:
        if self._background is not None:
            self._background.close(patience_seconds)
            self._background = None
        if self._mirror is not None:
            self._mirror.close()
        self._held.close()

    def save(self, step: int, contents: Contents) -> Path:
        """Commit a step, remove those that retention no longer keeps, and return its directory or this rank's part.

        An error on any rank is raised on all and leaves earlier steps unchanged. A step that cannot be removed is logged. If
        `begin_save` is used, call `finished(wait=True)` first.
        """
        saved = self._saver.save(step, contents)
        if saved.warning is not None:
            _log.error("step %d is committed, but %s", step, saved.warning)
        self._begin_upload()
        return saved.path

    def begin_save(self, step: int, contents: Contents) -> None:
        """Start committing a step while training goes on; the contents may change when this returns.

        An error in copying is raised on every rank. `finished` returns the rest, and must be called before the next save. Raises
        `ValueError` without a `background_timeout`.
        """
        if self._background is None:
            raise ValueError("these checkpoints have no process to save in the background")
        self._background.begin(step, contents)

    def finished(self, *, wait: bool) -> Finished | None:
        """Return the outcome of the save in the background, once, the same on every rank; None while it is under way or if there is none."""
        finished = None if self._background is None else self._background.finished(wait=wait)
        if finished is not None and finished.error is None:
            self._begin_upload()
        elif self._mirror is not None:
            self._mirror.hear()
        return finished

    def _begin_upload(self) -> None:
        if self._mirror is not None:
            self._mirror.begin()

    def resume(self, load: Load, arena: Arena | None = None) -> Resumed | None:
        """Load the newest usable step of this directory and its mirror, through `arena`; see `Resuming.resume`."""
        here = OnDisk(self._root, self._storage)
        sides: list[Side] = [here] if self._mirror is None else [here, self._mirror]
        if self.meets_on_mirror and self._mirror is not None:
            self._mirror.meet(here, leads=self._saver.leads)
            sides = [self._mirror]
        return Resuming(sides, self._layout, arena).resume(load)

    def mirror_to(self, mirror: Destination | None) -> None:
        """Resume from this mirror too, and sync it after every save."""
        self._mirror = mirror
        disks = self._saver.disks
        if mirror is not None and self._saver.leads:
            mirror.lead(disks.of_rank[self._layout.rank] if disks.are_several else None)

    def settle_mirror(
        self, seconds: float, stopped: Callable[[], bool], show: Callable[[float], None]
    ) -> BurnishError | None:
        """Wait for the mirror, and return why it is not in sync; None if it is, or without a mirror.

        Retries while the time lasts and `stopped` is false on every rank; rank 0 shows parts of 1. The same on every rank. Then
        removes what only waited for the mirror.
        """
        if self._mirror is None:
            return None
        left = self._mirror.settle(seconds, stopped, show)
        with agree(self._layout), naming_failures(f"{self._root} cannot be cleared"):
            if self._layout.is_main and (kept := self._saver.let_go()) is not None:
                _log.error("%s", kept)
        return left
