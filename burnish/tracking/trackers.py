"""The one verb of every sink of metrics, and several sinks as one.

Sinks: `jsonl` (the record of a run), `console` (a line for people) and `tensorboard`. Only the
main rank logs; every other rank holds an empty `Trackers`, so that no caller asks which rank it
is. Left out: what the numbers mean (`metrics`), and reduction over ranks, which happens before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol


class Tracker(Protocol):
    """Something that takes the numbers of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's numbers, by name (`actor/pg_loss`); values may be NaN or infinite.

        Called once per step, with steps ascending, and never after `close`. `values` is only read,
        and not kept. What was taken survives a kill of the process right after the call returns.
        Raises `OSError` when the sink cannot be written.
        """

    def sync(self) -> None:
        """Let what was taken survive a power loss, if it is a record that others are made from. Raises `OSError`."""

    def close(self) -> None:
        """Write out what is held and free it. A second call does nothing."""


class Trackers:
    """Several trackers as one; none at all on ranks that do not log."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the numbers to every tracker, in order."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def sync(self) -> None:
        """Let what each tracker records survive a power loss."""
        for tracker in self._trackers:
            tracker.sync()

    def close(self) -> None:
        """Close every tracker, the last first, also where one of them raises."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
