"""The tracker protocol, and several trackers as one.

Trackers: `jsonl` (the record of a run), `console`, `tensorboard`, and the user's own. Only the main rank logs; others hold an empty
`Trackers`. Numbers are reduced over ranks before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol


class Tracker(Protocol):
    """Something that takes the numbers of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's numbers by name (`actor/pg_loss`), NaN and infinity included.

        Called once per step, in ascending order, never after `close`. `values` is only read. What was taken must survive a kill right
        after the call. Raises `OSError` if writing fails.
        """

    def sync(self) -> None:
        """Make what was taken survive a power loss, if others depend on the record. Raises `OSError`."""

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
