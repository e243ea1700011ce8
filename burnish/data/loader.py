"""Choose the next samples from a seed and a global cursor, alike on any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from burnish.errors import UsageError
from burnish.records.seeds import derive_seed

Indices = npt.NDArray[np.int64]
"""Positions in a sequence, shape [N]."""


def order(seed: int, epoch: int, size: int) -> Indices:
    """Return the order of an epoch: a uniform permutation of 0 ... size - 1, shape [size].

    Sorts raw 64-bit draws of Philox4x64 (Salmon et al., SC 2011). NumPy promises that raw draws
    never change; it does not for `permutation`.
    """
    draws = np.random.Philox(key=derive_seed(seed, "shuffle", epoch)).random_raw(size)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


class Loader:
    """Yield indices into a data set, epoch after epoch.

    `cursor` counts samples since the run began, over all epochs and ranks. It is the only state.
    """

    def __init__(
        self, size: int, seed: int, shuffle: bool, cursor: int = 0, *, by_epoch: bool = False
    ) -> None:
        """`by_epoch`: one `take` never crosses the end of an epoch."""
        if size < 1:
            raise UsageError("a loader over no samples", want="at least one sample")
        if cursor < 0:
            raise UsageError("a loader's cursor counts samples", have=cursor, want="0 or more")
        self.size = size
        self.cursor = cursor
        self._seed = seed
        self._shuffle = shuffle
        self._by_epoch = by_epoch
        self._epoch: tuple[int, Indices] | None = None  # the order last asked for

    def takes(self, count: int, epochs: int) -> int:
        """Return how many calls of `take(count)` make up the first `epochs` epochs."""
        if self._by_epoch:
            return epochs * math.ceil(self.size / count)
        return math.ceil(epochs * self.size / count)

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices, across epochs; by epoch, at most the rest of this one."""
        if self._by_epoch:
            count = min(count, self.size - self.cursor % self.size)
        taken: list[int] = []
        while len(taken) < count:
            epoch, start = divmod(self.cursor, self.size)
            part = self._order(epoch)[start : start + count - len(taken)]
            taken.extend(part.tolist())
            self.cursor += len(part)
        return taken

    def _order(self, epoch: int) -> Indices:
        if not self._shuffle:
            return np.arange(self.size, dtype=np.int64)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, order(self._seed, epoch, self.size))
        return self._epoch[1]
