"""Give a conversation its own draws where a package draws from generators of the whole process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


class ProcessRandom:
    """A state of Python's and NumPy's process-wide generators, which is theirs inside a `with`.

    Conversations of a worker take turns, so their draws would otherwise depend on each other. Do not wait inside.
    """

    def __init__(self, seed: int) -> None:
        self._own = _states_of(random.Random(seed), np.random.RandomState(seed % 2**32))
        self._others: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        self._others = random.getstate(), np.random.get_state()
        _set(*self._own)

    def __exit__(self, *_: object) -> None:
        assert self._others is not None
        self._own = random.getstate(), np.random.get_state()
        _set(*self._others)


def _states_of(python: random.Random, numpy: np.random.RandomState) -> tuple[Any, Any]:
    return python.getstate(), numpy.get_state()


def _set(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
