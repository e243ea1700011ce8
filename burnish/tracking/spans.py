"""Measure host seconds and memory of each part of a step. Work of an accelerator counts where the host waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager


class Spans:
    """Seconds per named part, added up over a step, and the highest memory of each outermost part. For one thread.

    ```python
    with spans("rollout"):
        with spans("generate"): ...      # counted as rollout/generate, and within rollout
    tracker.log(step, spans.added({}))   # timing_s/rollout, timing_s/rollout.generate, timing_s/step
    ```
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] = lambda: None,
        reset_peak: Callable[[], None] = lambda: None,
        peak: Callable[[], int] = lambda: 0,
    ) -> None:
        """Take hooks for the device: `settle` waits for a span's work, `peak` is the most bytes in use since `reset_peak`."""
        self.now = clock
        self._settle = settle
        self._reset_peak = reset_peak
        self._peak = peak
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, int] = {}
        self._highest = 0
        self._open: list[str] = []
        self._taken_at = clock()
        self.current: str | None = None
        """The outermost span that is open, or the last one that raised."""
        self.step: int | None = None
        self.around: list[Callable[[str], AbstractContextManager[object]]] = []
        """Functions that turn a span's path, such as rollout/generate, into a context that the span runs in."""
        self.ended: list[Callable[[str, float, float], None]] = []
        """Functions that get each ended span: its path, its start on the clock `now`, its seconds."""
        self.moves = 0
        """Count of signs of progress: starts and ends of spans, and calls of `move`."""

    @property
    def path(self) -> str:
        """The open span, such as rollout/generate; for any thread."""
        return "/".join(self._open)

    def move(self) -> None:
        """Count a sign of progress."""
        self.moves += 1

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as `name` inside the open spans, even if it raises."""
        self._open.append(name)
        self.move()
        path = "/".join(self._open)
        outermost = path == name
        if outermost:
            self.current = name
            self._note_peak()
            self._reset_peak()
        start = self.now()
        try:
            with ExitStack() as stack:
                for around in self.around:
                    stack.enter_context(around(path))
                yield
                self._settle()
        finally:
            seconds = self.now() - start
            self._seconds[path] = self._seconds.get(path, 0.0) + seconds
            for observer in self.ended:
                observer(path, start, seconds)
            self._open.pop()
            self.move()
            if outermost:
                self._memory[name] = max(self._memory.get(name, 0), self._note_peak())
        if outermost:
            self.current = None

    def added(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return `values` with the measurements since the last call, and start again.

        Seconds are `timing_s/NAME` and `timing_s/step`, added to those in `values`; an inner span is `timing_s/OUTER.NAME`. Memory, in 10⁹ bytes, is
        `perf/max_memory_gb/NAME` for each outermost span, and `perf/max_memory_gb/all`. No name is a directory of another: some stores keep a file for each.
        """
        now = self.now()
        self._note_peak()
        sums = dict(values)
        for path, seconds in {**self._seconds, "step": now - self._taken_at}.items():
            name = f"timing_s/{path.replace('/', '.')}"
            sums[name] = sums.get(name, 0.0) + seconds
        sums |= {f"perf/max_memory_gb/{name}": size / 1e9 for name, size in self._memory.items()}
        sums["perf/max_memory_gb/all"] = self._highest / 1e9
        self._seconds = {}
        self._memory = {}
        self._taken_at = now
        return sums

    def _note_peak(self) -> int:
        peak = self._peak()
        self._highest = max(self._highest, peak)
        return peak
