"""Turn signals into a flag that training checks where it can stop cleanly.

A second SIGINT or SIGTERM ends the process at once. A second SIGHUP does not, because a closing terminal may send two. Slurm's
--signal mostly sends SIGUSR1. `AFTER_SAVE` lets the run go on until its next regular save. A signal that the process was started to
ignore, as nohup does with SIGHUP, stays ignored.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from burnish.distributed.collectives import any_rank, gather_objects
from burnish.distributed.environment import AFTER_SAVE, STOPPING, handling, ignored
from burnish.distributed.layout import Layout
from burnish.tracking.progress import leave_lost_terminal

_INSISTING = (signal.SIGINT, signal.SIGTERM)
_HEARD = "{name}: stopping at the next point where nothing is lost; another SIGINT or SIGTERM stops at once\n"

_log = logging.getLogger("burnish")


class StopRequested(Exception):
    """A signal asked the run to stop. Raised only where the trained state is consistent."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(signal_number)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signal_number).name}"


class Stopper:
    """Remembers the first signal; rank 0 confirms it on standard error."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.received: int | None = None
        self.insisted: Callable[[], None] = lambda: None
        """Called before a second signal ends the process at once. May raise `OSError`."""
        self._ends_after_save = False
        self._layout = layout or Layout()

    def check(self) -> None:
        """Raise `StopRequested` if a signal has arrived at this process."""
        if self.received is not None:
            raise StopRequested(self.received)

    def check_all(self, flag: bool = False) -> bool:
        """Return whether any rank sets the flag; raise `StopRequested` on all if a signal has reached any. Collective."""
        is_set = any_rank(flag or self.received is not None, self._layout)
        if is_set and (heard := [*filter(None, gather_objects(self.received, self._layout))]):
            raise StopRequested(heard[0])
        return is_set

    def check_saved(self) -> None:
        """Raise `StopRequested` on every rank if `AFTER_SAVE` has reached any. Collective."""
        if any_rank(self._ends_after_save, self._layout):
            raise StopRequested(AFTER_SAVE)

    def changed(self) -> Callable[[], bool]:
        """Return a function that tells whether a first signal has arrived since this call."""
        before = self.received
        return lambda: self.received != before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == AFTER_SAVE:
            self._ends_after_save = True
            return
        leave_lost_terminal()
        if self.received is not None:
            if number in _INSISTING:
                with suppress(OSError):
                    self.insisted()
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.received = number
        if self._layout.is_main:
            # Not by `print` or a logger: the signal may have come while one of them was writing.
            with suppress(OSError):
                os.write(2, _HEARD.format(name=signal.Signals(number).name).encode())


@contextmanager
def catch_signals(layout: Layout | None = None) -> Iterator[Stopper]:
    """Let signals set a flag of the yielded stopper inside the block; only the main thread can."""
    stopper = Stopper(layout)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and stopper._layout.is_main and (ignored_signals := ignored()):
        names = " and ".join(number.name for number in ignored_signals)
        what = (
            "a closed terminal does not stop"
            if signal.SIGHUP in ignored_signals
            else "Ctrl-C does not stop"
        )
        _log.info("%s: ignored since the start; %s this process, SIGTERM does", names, what)
    with handling((*STOPPING, AFTER_SAVE) if is_main else (), stopper._handle):
        yield stopper
