"""Choose the next samples from a seed and a global cursor, alike on any number of ranks."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from burnish.errors import IncompatibleError
from burnish.records.seeds import derive_seed

# Positions in a sequence, shape [N].
_Indices = npt.NDArray[np.int64]
Difficulty = npt.NDArray[np.float64]
"""A number for each sample, shape [N]; samples with small numbers come first."""

MEASURED = "measured"
"""The value of `data.curriculum` that names no column."""
_MOST_ALIKE = 3
PERIOD = 10_000
"""Samples after which the pattern of a mixture repeats."""


def order(seed: int, epoch: int, size: int, difficulty: Difficulty | None = None) -> _Indices:
    """Return the order of an epoch: a uniform permutation of 0 ... size - 1, shape [size].

    With `difficulty`, only equally difficult samples are shuffled. Sorts raw draws of Philox4x64 (Salmon et al., SC 2011),
    which NumPy promises never to change, unlike `permutation`.
    """
    draws = np.random.Philox(key=derive_seed(seed, "shuffle", epoch)).random_raw(size)
    keys = (draws,) if difficulty is None else (draws, difficulty)
    return np.lexsort(keys).astype(np.int64, copy=False)


State = int | tuple[int | str, ...]
"""A loader's whole state: `cursor`, then the place in each stream, or the measurements."""


class Loader:
    """Yield indices into a data set, epoch after epoch.

    `cursor`, its only state, counts samples over all epochs and ranks.
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
        """`by_epoch`: one `take` never crosses an epoch's end. An epoch goes from small to large `difficulty`."""
        self.size = size
        self.cursor = cursor
        self._seed = seed
        self._shuffle = shuffle
        self._by_epoch = by_epoch
        self._difficulty = difficulty
        self._epoch: tuple[int, _Indices] | None = None  # the latest epoch and its order

    @property
    def state(self) -> State:
        """The state that a checkpoint holds."""
        return self.cursor

    @state.setter
    def state(self, state: State) -> None:
        if not isinstance(state, int):
            raise unfit(state)
        self.cursor = state

    def update(self, indices: Sequence[int], are_alike: Sequence[bool]) -> None:
        """Take note whether all completions of each sample had equal rewards."""

    def takes(self, count: int, epochs: int) -> int:
        """Return how many `take(count)` make up `epochs` epochs."""
        return math.ceil(epochs * self.epoch_steps(count))

    def epoch_steps(self, count: int) -> Fraction:
        """Return how many `take(count)` make up an epoch, which may end within one."""
        steps = Fraction(self.size, count)
        return Fraction(math.ceil(steps)) if self._by_epoch else steps

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices, across epochs; by epoch, at most the rest of this one."""
        if self._by_epoch:
            count = min(count, self.size - self.cursor % self.size)
        indices: list[int] = []
        while len(indices) < count:
            # Epoch and place follow from the cursor, and an epoch's order from its seed. So a checkpoint holds one number, and no
            # loader has to skip what a run has had. It counts samples of all ranks: another number of ranks reads on from it.
            epoch, start = divmod(self.cursor, self.size)
            part = self._order(epoch)[start : start + count - len(indices)]
            indices.extend(part.tolist())
            self.cursor += len(part)
        return indices

    def _order(self, epoch: int) -> _Indices:
        if self._epoch is None or self._epoch[0] != epoch:
            if self._shuffle:
                indices = order(self._seed, epoch, self.size, self._difficulty)
            elif self._difficulty is None:
                indices = np.arange(self.size, dtype=np.int64)
            else:
                indices = np.argsort(self._difficulty, kind="stable").astype(np.int64, copy=False)
            self._epoch = (epoch, indices)
        return self._epoch[1]


def unfit(state: State) -> IncompatibleError:
    """Return the error for the state of another kind of loader."""
    return IncompatibleError(
        "the position in the data is of another kind",
        have="a number" if isinstance(state, int) else f"{len(state)} parts",
        do="resume with the version of Burnish that wrote it",
    )


def pattern(weights: Sequence[float]) -> tuple[_Indices, _Indices]:
    """Return the source of each sample in a mixture's period, and each source's count."""
    edges = np.round(np.cumsum([0.0, *weights]) / sum(weights) * PERIOD).astype(np.int64)
    counts = np.diff(edges)
    places = [(np.arange(count) + 0.5) / count for count in counts if count]
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources[np.argsort(np.concatenate(places), kind="stable")], counts


class MeasuredLoader(Loader):
    """Yield prompts less often while all their completions have equal rewards: these teach nothing.

    An epoch includes a prompt with probability 1/2 after one such group, 1/4 after two, then 1/8. `cursor` counts skipped
    prompts too. The state has a byte for each prompt.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        super().__init__(size, seed, shuffle)
        self._alike = bytes(size)  # such groups in a row; copies of the loader share the bytes
        self._draws: tuple[int, npt.NDArray[np.uint64]] | None = None

    @property
    def state(self) -> State:
        """See `Loader.state`."""
        return self.cursor, base64.b64encode(zlib.compress(self._alike, 1)).decode()

    @state.setter
    def state(self, state: State) -> None:
        match state:
            case 0:
                self.cursor, self._alike = 0, bytes(self.size)
            case (int(cursor), str(text)):
                try:
                    alike = zlib.decompress(base64.b64decode(text, validate=True))
                except (ValueError, zlib.error) as error:
                    raise unfit(state) from error
                if len(alike) != self.size:
                    raise unfit(state)
                self.cursor = cursor
                self._alike = alike
            case _:
                raise unfit(state)

    def take(self, count: int) -> list[int]:
        """See `Loader.take`."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, at = divmod(self.cursor, self.size)
            index = int(self._order(epoch)[at])
            self.cursor += 1
            if self._is_due(epoch, index):
                indices.append(index)
        return indices

    def update(self, indices: Sequence[int], are_alike: Sequence[bool]) -> None:
        """See `Loader.update`."""
        alike = bytearray(self._alike)
        for index, is_alike in zip(indices, are_alike, strict=True):
            alike[index] = min(alike[index] + 1, _MOST_ALIKE) if is_alike else 0
        self._alike = bytes(alike)

    def _is_due(self, epoch: int, index: int) -> bool:
        times = self._alike[index]
        if times == 0:
            return True
        if self._draws is None or self._draws[0] != epoch:
            key = derive_seed(self._seed, "measured", epoch)
            self._draws = epoch, np.random.Philox(key=key).random_raw(self.size)
        return int(self._draws[1][index]) >> (64 - times) == 0


class MixedLoader(Loader):
    """Yield indices into data sets that lie end to end, each as often as its weight says.

    A fixed pattern keeps every span of samples close to the weights.
    """

    def __init__(self, loaders: Sequence[Loader], weights: Sequence[float]) -> None:
        super().__init__(sum(loader.size for loader in loaders), seed=0, shuffle=False)
        self._pattern, self._counts = pattern(weights)
        self._offsets = np.cumsum([0, *(loader.size for loader in loaders)])
        self._loaders = tuple(loaders)

    def take(self, count: int) -> list[int]:
        """See `Loader.take`."""
        period, start = divmod(self.cursor, PERIOD)
        before = np.bincount(self._pattern[:start], minlength=len(self._loaders))
        for loader, share, drawn in zip(self._loaders, self._counts, before, strict=True):
            loader.cursor = int(period * share + drawn)
        numbers = range(self.cursor, self.cursor + count)
        sources = [int(self._pattern[number % PERIOD]) for number in numbers]
        self.cursor += count
        return [int(self._offsets[source]) + self._loaders[source].take(1)[0] for source in sources]
