"""A run's `checkpoints/`: opened by one run at a time, saved into, resumed from, kept in bounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from burnish.checkpoint.background import BackgroundSaver, Finished
from burnish.checkpoint.destinations.disks import find_disks
from burnish.checkpoint.destinations.mirror import Mirror, clear_unfinished
from burnish.checkpoint.destinations.uploader import SyncProgress, Uploader
from burnish.checkpoint.resume import (
    Load,
    OnDisk,
    OnMirror,
    Resumed,
    Resuming,
    Side,
    require_meeting,
)
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import Contents, Saver
from burnish.checkpoint.steps import clear
from burnish.checkpoint.writer import SavePlanner
from burnish.config.places import CHECKPOINTS, mirror_url, run_directory
from burnish.config.schema import RunConfig
from burnish.distributed.collectives import agree, any_rank, gather_objects
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.durable import Removals, make_dirs_durably, naming_failures
from burnish.files.lease import Lease, Token
from burnish.files.storage import LocalStorage, Storage

_LEASE = ".lease"
_OWN_LEVELS = 3
# The run's directory, that of all runs, and the one that holds it: the run may have made the former.
_PATIENCE_SECONDS = 30.0
# For a save in flight when a run ends with an error.
_LOOK_SECONDS = 0.2
# Between two looks at the mirror at the end of a run.
_PAUSE_SECONDS = 5.0
# Before what failed there is tried again.

_log = logging.getLogger(__name__)


class Checkpoints:
    """The directory, held exclusively from entering to leaving the block. All methods are collective.

    `retention` says which steps are kept; `reserve_bytes` of the disk stay free. Entering clears
    what a killed run left half written, as far as the disk lets go of it; raises `BurnishError` when
    another run holds the directory, and when it is not one for all ranks and no mirror is to be
    where their disks meet. Where it is, each disk gets a portion of a step, and a step is committed
    when the mirror has all of it; see `meets_on_mirror`.
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
        planner, kept = SavePlanner(layout), retention or Retention()
        self._saver = Saver(root, planner, self._storage, kept, reserve_bytes)
        self._background_timeout = background_timeout
        self._background: BackgroundSaver | None = None
        self._mirror: Mirror | None = None
        self._uploader: Uploader | None = None
        self._lease: Lease | None = None
        self._held = ExitStack()

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> Self:
        """Those of a run."""
        settings, patience = config.checkpoint, config.distributed.timeout_seconds
        return cls(
            run_directory(config) / CHECKPOINTS,
            layout,
            retention=Retention.of(settings, mirror_url(config)),
            reserve_bytes=int(settings.reserve_gb * 1e9),
            background_timeout=patience if settings.background else None,
        )

    def __enter__(self) -> Self:
        """Take the lease and clear leftovers, on each disk."""
        lease = self._root / _LEASE
        try:
            token = None
            with agree(self._layout):
                if self._layout.is_main:
                    token = self._take(lease)
            meets = self._saver.retention.mirror is not None
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
        """Whether the ranks have several disks, so that a step is committed on the mirror, and nowhere before."""
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
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None
        self._held.close()

    def save(self, step: int, contents: Contents) -> Path:
        """Commit a step and remove those that need no longer be kept; returns its directory, or this rank's portion's.

        An error on any rank is raised on every rank and leaves earlier steps untouched; where an
        older step could not be removed, the log has an error and nothing is raised. Whoever uses
        `begin_save` asks `finished(wait=True)` first.
        """
        saved = self._saver.save(step, contents)
        if saved.warning is not None:
            _log.error("step %d is committed, but %s", step, saved.warning)
        self._begin_upload()
        return saved.path

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
        finished = None if self._background is None else self._background.finished(wait=wait)
        if finished is not None and finished.error is None:
            self._begin_upload()
        elif self._uploader is not None:
            self._uploader.hear()
        return finished

    def _let_go(self) -> None:
        """Remove what only waited for the mirror."""
        with agree(self._layout), naming_failures(f"{self._root} cannot be cleared"):
            if self._layout.is_main and (left := self._saver.let_go()) is not None:
                _log.error("%s", left)

    def _begin_upload(self) -> None:
        if self._uploader is not None:
            self._uploader.begin()

    def resume(self, load: Load, arena: Arena | None = None) -> Resumed | None:
        """Load the newest step that can be, of this directory and its mirror, by way of `arena`; see `Resuming.resume`."""
        here = OnDisk(self._root, self._storage)
        there = None if self._mirror is None else OnMirror(self._mirror)
        sides: list[Side] = [here] if there is None else [here, there]
        if self.meets_on_mirror and there is not None:
            require_meeting(here, there, self._layout, leads=self._saver.leads)
            self._clear_mirror(there)
            sides = [there]
        return Resuming(sides, self._layout, arena).resume(load)

    def _clear_mirror(self, there: OnMirror) -> None:
        """Remove what was never committed, as long as no disk sends anything; what would come late is not begun with."""
        with agree(self._layout):
            if self._layout.is_main and self._mirror is not None:
                clear_unfinished(self._mirror, there.source)
                if self._mirror.remote.may_change_late:
                    raise BurnishError(
                        f"a removal from {self._mirror.remote} hangs, and could come over what is sent later",
                        want="a service that answers",
                        do="start the same command again",
                    )

    def mirror_to(self, mirror: Mirror | None) -> None:
        """From here on, resume from this mirror as well, and bring it in line after every save."""
        self._mirror = mirror
        disks = self._saver.disks
        if mirror is not None and self._saver.leads:
            disk = disks.of_rank[self._layout.rank] if disks.are_several else None
            self._uploader = Uploader(replace(mirror, disk=disk))

    def settle_mirror(
        self, seconds: float, stopped: Callable[[], bool], show: Callable[[SyncProgress], None]
    ) -> BurnishError | None:
        """Bring the mirror in line once more and wait for it; says why it is not, when it is not.

        It is tried again while the time lasts and `stopped` is false on every rank; rank 0 shows how
        far it is. The same on every rank; None as well where there is no mirror.
        """
        if self._mirror is None:
            return None
        deadline = time.monotonic() + seconds
        left = BurnishError(
            f"{self._mirror.remote} is not waited for any longer",
            have="a copy that is still under way",
            want=f"one that is done within {seconds:.0f} seconds, and before a signal",
            do="start the same command again, or set checkpoint.mirror_patience_seconds higher",
        )
        if self._uploader is not None:
            self._uploader.begin()
        while True:
            done, error = True, None
            if self._uploader is not None:
                done = not self._uploader.hear(_LOOK_SECONDS)
                error = self._uploader.error
                show(self._uploader.progress)
            told = gather_objects((done, error), self._layout)
            failed = [error for done, error in told if done and error is not None]
            lasting = [error for error in failed if type(error) is not BurnishError]
            if lasting or (not failed and all(done for done, _ in told)):
                self._let_go()
                return next(iter(lasting), None)  # another try would not change it
            if any_rank(stopped() or time.monotonic() > deadline, self._layout):
                return next((error for _, error in told if error is not None), left)
            if failed and self._uploader is not None:
                time.sleep(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))
                self._uploader.begin()
