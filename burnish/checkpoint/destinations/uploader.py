"""The process that syncs a mirror while training goes on, and the training process's end: rank 0's, or each disk's leader's.

It runs one `Sync` and `PortionSync` after the other when asked. A failure is logged loudly, stops nothing, and is retried after the
next save and at the end. A write that hung ends the process after its sync, so that it cannot come late.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from burnish.checkpoint.destinations.mirror import Mirror, Seen, Sync
from burnish.checkpoint.destinations.partial_sync import LOOK_SECONDS, Pause, PortionSync
from burnish.checkpoint.subprocess import Companion, accompany
from burnish.errors import BurnishError

_SYNC, _NUDGE = "sync", "nudge"
# What it is sent: what to do, and that it should wait for other disks no longer.
_WHAT = "the process that copies to the mirror"
_DO = "correct what it names; the next save, or the same command again, goes on from there"
_REPORTS = 100
# Most messages of progress in one sync: they have to fit into the pipe, for nobody may be reading.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """How far a sync is."""

    done: int
    """Bytes moved."""
    total: int
    """Bytes to move."""


@dataclass(frozen=True, slots=True)
class Synced:
    """What came of a sync."""

    steps: tuple[int, ...]
    """The steps that were sent."""
    error: BurnishError | None
    """None when the mirror has all that it should."""
    may_change_late: bool = False
    """Whether a write hung and was given up, and may come to pass while the process lives."""


def serve(pipe: int, parent: int) -> None:
    """Be the process of `parent`; the descriptor is this process's own."""
    accompany(parent)
    with Connection(pipe) as connection:
        mirror: Mirror = connection.recv()
        seen = Seen()
        while True:
            try:
                while connection.recv() != _SYNC:  # a nudge that came too late for what it was for
                    pass
            except EOFError:
                return
            synced = _synced(mirror, seen, connection.send, connection.poll)
            connection.send(replace(synced, may_change_late=mirror.remote.may_change_late))


def _synced(
    mirror: Mirror, seen: Seen, tell: Callable[[SyncProgress], None], pause: Pause
) -> Synced:
    try:
        meter = _Meter(tell)
        sync = None if mirror.disk else Sync(mirror, meter.moved, seen)
        portions = PortionSync(mirror, meter.moved)
        meter.total = portions.size() + (0 if sync is None else sync.size())
        steps = [] if sync is None else sync.run()
        made = portions.run(pause)
        if sync is not None and made:
            # Steps that are new there may let others go.
            _retain(Sync(mirror, meter.moved, seen), pause)
        return Synced((*steps, *made), None)
    except BurnishError as error:
        return Synced((), error)
    except Exception as error:  # noqa: BLE001 - told to the training process, which goes on
        have = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return Synced(
            (), BurnishError(f"{mirror.remote} could not be brought in line", have=have, do=_DO)
        )


def _retain(sync: Sync, pause: Pause) -> None:
    """Apply the mirror's retention after a sync, and wait for other disks that have yet to see what it removes."""
    sync.run()
    while sync.unseen and not pause(LOOK_SECONDS):
        sync.retain()


class _Meter:
    """Tells of every hundredth part; from several threads, of which the last word wins."""

    def __init__(self, tell: Callable[[SyncProgress], None]) -> None:
        self.total = 0
        self._tell = tell
        self._done = self._told = 0
        self._lock = threading.Lock()

    def moved(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done = min(self._done + count, self.total)
            if self._done - self._told > self.total // _REPORTS:
                self._told = self._done
                self._tell(SyncProgress(self._done, self.total))


class Uploader:
    """The training process's end: asks for syncs and gets their outcomes. Starts the process when first needed."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        """What is mirrored."""
        self.progress = SyncProgress(0, 0)
        """Of the sync under way."""
        self.error: BurnishError | None = None
        """Why the last sync that ended did not do all."""
        self._companion: Companion | None = None
        self._busy = False
        self._again = False

    def begin(self) -> None:
        """Ask for a sync; for another one, where one is under way. Returns at once."""
        self.hear()
        companion = self._companion
        if self._busy:
            if companion is not None and not self._again:
                companion.send(_NUDGE)
            self._again = True
            return
        if companion is None or not companion.is_alive():
            companion = self._start()
        self.progress = SyncProgress(0, 0)
        self._busy = companion.send(_SYNC)
        if not self._busy:
            self._note(Synced((), companion.died()))

    def hear(self, seconds: float = 0.0) -> bool:
        """Take the news there are, waiting so long for the first; whether a sync is under way."""
        while self._busy and self._companion is not None:
            answer = self._companion.answer(seconds)
            seconds = 0.0
            if answer is None:
                break
            if isinstance(answer, SyncProgress):
                self.progress = answer
                continue
            self._busy = False
            self._note(answer if isinstance(answer, Synced) else Synced((), answer))
            if self._again:
                self._again = False
                self.begin()
        return self._busy

    def close(self) -> None:
        """End the process, whatever it is doing; the next start goes on from there."""
        if self._companion is not None:
            self._companion.kill()
            self._companion = None
        self._busy = False

    def _start(self) -> Companion:
        self.close()
        self._companion = Companion("burnish.checkpoint.destinations.uploader", _WHAT)
        self._companion.send(self.mirror)
        return self._companion

    def _note(self, synced: Synced) -> None:
        self.error = synced.error
        for step in synced.steps:
            _log.info("step %d is on the mirror, %s", step, self.mirror.remote)
        if synced.error is not None:
            _log.error("THE MIRROR IS BEHIND; training goes on. %s", synced.error)
        if synced.may_change_late:
            _log.warning(
                "a write to %s hung: the process that copies is started again, and looks at all that is there",
                self.mirror.remote,
            )
            self.close()
            self._again = self._again or synced.error is None
