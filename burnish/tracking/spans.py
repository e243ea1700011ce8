"""How long each part of a step took, in host seconds. Work queued on an accelerator counts where the host waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Spans:
    """Seconds per named part, added up over a step. For one thread.

    ```python
    with spans("rollout"):
        with spans("generate"): ...      # counted as rollout/generate, and within rollout
    tracker.log(step, spans.take())      # timing_s/rollout, timing_s/rollout/generate, timing_s/step
    ```
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        around: Callable[[str], AbstractContextManager[None]] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Enter `around` with the name of every span; call `settle` to wait for the work that a span began."""
        self._clock, self._around, self._settle = clock, around, settle
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._taken_at = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's seconds under `name`, inside the spans that are open, also if it raises."""
        self._open.append(name)
        path = "/".join(self._open)
        start = self._clock()
        try:
            with nullcontext() if self._around is None else self._around(name):
                yield
                if self._settle is not None:
                    self._settle()
        finally:
            self._seconds[path] = self._seconds.get(path, 0.0) + self._clock() - start
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Return the seconds since the last take, and start again.

        `timing_s/NAME` for every span that ended, and `timing_s/step` for all the time between. A span still open counts, whole, for the
        step in which it ends.
        """
        now = self._clock()
        taken = {f"timing_s/{path}": seconds for path, seconds in self._seconds.items()}
        taken["timing_s/step"] = now - self._taken_at
        self._seconds = {}
        self._taken_at = now
        return taken


def added(values: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """The numbers with these seconds added to those of the same names."""
    return {**values, **{name: values.get(name, 0.0) + more for name, more in seconds.items()}}
