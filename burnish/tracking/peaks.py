"""The highest memory of each part of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GIGABYTE = 1e9


class Peaks:
    """The highest memory in use within each outermost part, in bytes. For one thread.

    `peak` returns the most bytes since the last `reset`, or since the process began.
    """

    def __init__(self, reset: Callable[[], None], peak: Callable[[], int]) -> None:
        self._reset, self._peak = reset, peak
        self._parts: dict[str, int] = {}
        self._highest = 0
        self._open: list[str] = []
        self.current: str | None = None
        """The part that runs, or the last one that raised."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as `name`, unless it is within another part."""
        self._open.append(name)
        outermost = len(self._open) == 1
        if outermost:
            self.current = name
            self._note()
            self._reset()
        try:
            yield
        finally:
            self._open.pop()
            if outermost:
                self._parts[name] = max(self._parts.get(name, 0), self._note())
        if outermost:
            self.current = None

    def take(self) -> dict[str, float]:
        """`perf/max_memory_gb/NAME` of each part since the last take, and `perf/max_memory_gb` since the beginning; 10⁹ bytes."""
        self._note()
        taken = {f"perf/max_memory_gb/{name}": size for name, size in self._parts.items()}
        taken["perf/max_memory_gb"] = self._highest
        self._parts = {}
        return {name: size / _GIGABYTE for name, size in taken.items()}

    def _note(self) -> int:
        peak = self._peak()
        self._highest = max(self._highest, peak)
        return peak
