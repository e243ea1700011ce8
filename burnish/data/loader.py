"""Choose the next samples from a seed and a global cursor, alike on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from burnish.errors import IncompatibleError, UsageError
from burnish.records.seeds import derive_seed

Indices = npt.NDArray[np.int64]
"""Positions in a sequence, shape [N]."""
Difficulty = npt.NDArray[np.float64]
"""A number for each sample, shape [N]; those of small numbers come first."""

PERIOD = 10_000
"""Samples after which the pattern of a mixture repeats."""


def order(seed: int, epoch: int, size: int, difficulty: Difficulty | None = None) -> Indices:
    """Return the order of an epoch: a uniform permutation of 0 ... size - 1, shape [size].

    With `difficulty` only samples that are equally difficult change places.

    Sorts raw 64-bit draws of Philox4x64 (Salmon et al., SC 2011). NumPy promises that raw draws
    never change; it does not for `permutation`.
    """
    draws = np.random.Philox(key=derive_seed(seed, "shuffle", epoch)).random_raw(size)
    keys = (draws,) if difficulty is None else (draws, difficulty)
    return np.lexsort(keys).astype(np.int64, copy=False)


State = int | tuple[int, ...]
"""All that a loader must remember: `cursor`, and where rows are streamed the place in each stream."""


class Loader:
    """Yield indices into a data set, epoch after epoch.

    `cursor` counts samples since the run began, over all epochs and ranks. It is the only state.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        shuffle: bool,
        cursor: int = 0,
        *,
        by_epoch: bool = False,
        difficulty: Difficulty | None = None,
    ) -> None:
        """`by_epoch`: one `take` never crosses the end of an epoch. Each epoch goes from small to large `difficulty`."""
        if size < 1:
            raise UsageError("a loader over no samples", want="at least one sample")
        if cursor < 0:
            raise UsageError("a loader's cursor counts samples", have=cursor, want="0 or more")
        self.size = size
        self.cursor = cursor
        self._seed = seed
        self._shuffle = shuffle
        self._by_epoch = by_epoch
        self._difficulty = difficulty
        self._epoch: tuple[int, Indices] | None = None  # the order last asked for

    @property
    def state(self) -> State:
        """What a checkpoint holds of it. Assigning it goes on from there."""
        return self.cursor

    @state.setter
    def state(self, state: State) -> None:
        self.cursor = require_places(state, 0)[0]

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
        if self._epoch is None or self._epoch[0] != epoch:
            if self._shuffle:
                found = order(self._seed, epoch, self.size, self._difficulty)
            elif self._difficulty is None:
                found = np.arange(self.size, dtype=np.int64)
            else:
                found = np.argsort(self._difficulty, kind="stable").astype(np.int64, copy=False)
            self._epoch = (epoch, found)
        return self._epoch[1]


def require_places(state: State, count: int) -> tuple[int, ...]:
    """Return the cursor of a state and its `count` places; all are 0 at the beginning. Raises `IncompatibleError` for other states."""
    found = (0,) * (count + 1) if state == 0 else (state,) if isinstance(state, int) else state
    if len(found) != count + 1:
        raise IncompatibleError(
            "the position in the data is of another kind",
            have=f"{len(found) - 1} places in streams",
            want=str(count),
            do="resume with the version of Burnish that wrote it",
        )
    return found


def pattern(weights: Sequence[float]) -> tuple[Indices, Indices]:
    """Return which source each sample of a period of a mixture is from, and how many are from each."""
    edges = np.round(np.cumsum([0.0, *weights]) / sum(weights) * PERIOD).astype(np.int64)
    counts = np.diff(edges)
    places = [(np.arange(count) + 0.5) / count for count in counts if count]
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources[np.argsort(np.concatenate(places), kind="stable")], counts


class MixedLoader(Loader):
    """Yield indices into data sets that lie end to end, each as often as its weight says.

    The data sets alternate in a fixed pattern, so every stretch of samples has nearly their shares.
    `cursor` is the only state here as well.
    """

    def __init__(self, loaders: Sequence[Loader], weights: Sequence[float]) -> None:
        """Mix the samples of `loaders`. Shares are rounded to 1 of 10,000."""
        super().__init__(sum(loader.size for loader in loaders), seed=0, shuffle=False)
        self._pattern, self._counts = pattern(weights)
        self._offsets = np.cumsum([0, *(loader.size for loader in loaders)])
        self._loaders = tuple(loaders)

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices, across epochs of the data sets."""
        period, start = divmod(self.cursor, PERIOD)
        before = np.bincount(self._pattern[:start], minlength=len(self._loaders))
        for loader, share, taken in zip(self._loaders, self._counts, before, strict=True):
            loader.cursor = int(period * share + taken)
        numbers = range(self.cursor, self.cursor + count)
        sources = [int(self._pattern[number % PERIOD]) for number in numbers]
        self.cursor += count
        return [int(self._offsets[source]) + self._loaders[source].take(1)[0] for source in sources]
