"""SIGINT and SIGTERM become a flag that training looks at where it can stop cleanly.

A handler only records the signal; `Stopper.check` raises at a safe point, and the run then commits
a checkpoint. A second signal ends the process at once, for a person who means it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from burnish.parallel.collectives import any_rank
from burnish.parallel.layout import Layout

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """A signal asked for an end; raised only where the trained state is consistent."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")


class Stopper:
    """Remembers the first signal that arrived."""

    def __init__(self) -> None:
        self.received: int | None = None

    def check(self) -> None:
        """Raise `StopRequested` when a signal has arrived at this process."""
        if self.received is not None:
            raise StopRequested(self.received)

    def changed(self) -> Callable[[], bool]:
        """Tells whether a first signal has arrived since this call."""
        before = self.received
        return lambda: self.received != before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number


def check_stop(stopper: Stopper, layout: Layout) -> None:
    """Raise `StopRequested` on every rank when a signal has reached any of them. Collective."""
    received = stopper.received
    if any_rank(received is not None, layout):
        raise StopRequested(signal.SIGTERM if received is None else received)


@contextmanager
def catch_signals() -> Iterator[Stopper]:
    """Inside the block SIGINT and SIGTERM set the yielded flag; the former handlers return after it."""
    stopper = Stopper()
    former = {number: signal.signal(number, stopper._handle) for number in _SIGNALS}
    try:
        yield stopper
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
