"""Find the slowest rank in those parts of a step in which ranks work independently."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from burnish.tracking.stats import Max, Stats

log = logging.getLogger("burnish")

# A straggler takes _FACTOR times as long as the median rank, and _SECONDS longer, in _STEPS steps in a row.
_FACTOR = 1.5
_SECONDS = 1.0
_STEPS = 3


class Stragglers:
    """Adds every rank's seconds in a step's parts; the same on every rank."""

    def __init__(self, *, warns: bool) -> None:
        self._seconds = dict[str, npt.NDArray[np.float64]]()
        self._in_a_row: dict[str, tuple[int, int]] = {}
        self._named: set[tuple[str, int]] = set()
        self._warns = warns

    def update(self, took: Mapping[str, npt.ArrayLike]) -> None:
        """Add the seconds of a round, by part and rank."""
        for part, more in took.items():
            self._seconds[part] = self._seconds.get(part, 0.0) + np.asarray(more, np.float64)

    def stats(self) -> Stats:
        """End the step: return each part's slowest rank and its time over the median's; warn of lasting ones."""
        slowest = Stats()
        for part, seconds in self._seconds.items():
            rank = int(seconds.argmax())
            typical = float(np.median(seconds))
            longest = float(seconds[rank])
            slowest[f"perf/slowest_rank/{part}"] = Max(float(rank))
            slowest[f"perf/slowest_share/{part}"] = Max(longest / typical if typical else 1.0)
            is_slow = longest > _FACTOR * typical and longest > typical + _SECONDS
            last, count = self._in_a_row.get(part, (rank, 0))
            self._in_a_row[part] = rank, (count + 1 if last == rank else 1) if is_slow else 0
            if self._in_a_row[part][1] == _STEPS and (part, rank) not in self._named:
                self._named.add((part, rank))
                if self._warns:
                    log.warning(
                        "rank %d is the slowest to %s in %d steps in a row: %.1f s, and the median rank %.1f s; burnish doctor tests its device",
                        rank,
                        part,
                        _STEPS,
                        longest,
                        typical,
                    )
        self._seconds.clear()
        return slowest
