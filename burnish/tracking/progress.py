"""Show progress of a run's phases: setup, rollout, update.

On a terminal, bars vanish when their phase ends. Elsewhere a long phase prints a plain line, so
that a hang shows. `advance` draws, at most ten times a second; there is no thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_DRAW_SECONDS = 0.1
_LINE_SECONDS = 30.0


class Bar:
    """One phase under way. `show` gets its count and its age, every `seconds`."""

    def __init__(
        self, show: Callable[[float, float], None], seconds: float, clock: Callable[[], float]
    ) -> None:
        self._show, self._seconds, self._clock = show, seconds, clock
        self._done = 0.0
        self._began = self._shown_at = clock()

    def advance(self, count: float = 1) -> None:
        """Count so many more of the phase's units as done."""
        self._done += count
        now = self._clock()
        if now - self._shown_at >= self._seconds:
            self._shown_at = now
            self._show(self._done, now - self._began)


class Progress:
    """Show phases on `stream` (default: standard error) if `enabled` (main rank). Phases may nest."""

    def __init__(
        self,
        enabled: bool,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._console = Console(file=stream, stderr=stream is None, quiet=not enabled)
        self._bars = RichProgress(
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[Bar]:
        """Show `name` with a bar up to `total` (None: unknown) while the block runs.

        Call `bar.advance(k)` from the block's thread only.
        """
        if not self._console.is_terminal or self._console.quiet:
            of_total = "" if total is None else f"/{total:g}"

            def line(done: float, seconds: float) -> None:
                said = f"{name} {done:g}{of_total} after {seconds:.0f}s"
                self._console.print(said, soft_wrap=True, highlight=False, markup=False)

            yield Bar(line, _LINE_SECONDS, self._clock)
            return
        task = self._bars.add_task(name, total=total)
        self._bars.start()
        self._bars.refresh()
        try:
            yield Bar(
                lambda done, _: self._bars.update(task, completed=done, refresh=True),
                _DRAW_SECONDS,
                self._clock,
            )
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()
