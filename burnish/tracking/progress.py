"""Progress bars for the phases of a run: setup, rollout, update.

On a terminal, bars that vanish when their phase ends. Elsewhere a plain line, only for a long phase, so that a hang shows where.
`advance` draws, at most ten times a second; there is no thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_DRAW_SECONDS = 0.1
_LINE_SECONDS = 30.0


class Bar(Protocol):
    """One phase under way."""

    def advance(self, count: float = 1) -> None:
        """So many more of the phase's units are done."""


class _Silent:
    """A phase nobody watches."""

    def advance(self, count: float = 1) -> None:
        """Nothing to show."""


class _Drawn:
    """A bar on a terminal."""

    def __init__(self, progress: RichProgress, name: str, total: float | None) -> None:
        self._progress = progress
        self._done = 0.0
        self._total = total
        self._drawn_at = time.monotonic()
        self.task = progress.add_task(name, total=total)

    def advance(self, count: float = 1) -> None:
        """Draw, unless that was a moment ago."""
        self._done += count
        moment = time.monotonic()
        if moment - self._drawn_at >= _DRAW_SECONDS:
            self._drawn_at = moment
            self._progress.update(self.task, completed=self._done, refresh=True)


class _Plain:
    """A line now and then."""

    def __init__(
        self, stream: Console, name: str, total: float | None, clock: Callable[[], float]
    ) -> None:
        self._stream = stream
        self._name = name
        self._total = total
        self._clock = clock
        self._done = 0.0
        self._start = self._said_at = clock()

    def advance(self, count: float = 1) -> None:
        """Say how far it is, unless that was said a moment ago."""
        self._done += count
        moment = self._clock()
        if moment - self._said_at >= _LINE_SECONDS:
            self._said_at = moment
            of_total = "" if self._total is None else f"/{self._total:g}"
            line = f"{self._name} {self._done:g}{of_total} after {moment - self._start:.0f}s"
            self._stream.print(line, soft_wrap=True, highlight=False, markup=False)


class Progress:
    """Shows phases on `stream` (default: standard error) if `enabled`, which only the main rank's is. Phases may nest."""

    def __init__(
        self,
        enabled: bool,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled = enabled
        self._clock = clock
        self._console = Console(file=stream, stderr=stream is None)
        self._bars = RichProgress(
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )
        self._depth = 0

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[Bar]:
        """Show `name` with a bar up to `total` (unknown: None) while the block runs.

        Call `bar.advance(k)` from the block's thread only.
        """
        if not self._enabled:
            yield _Silent()
        elif not self._console.is_terminal:
            yield _Plain(self._console, name, total, self._clock)
        else:
            with self._drawn(name, total) as bar:
                yield bar

    @contextmanager
    def _drawn(self, name: str, total: float | None) -> Iterator[_Drawn]:
        bar = _Drawn(self._bars, name, total)
        self._depth += 1
        if self._depth == 1:
            self._bars.start()
        else:
            self._bars.refresh()
        try:
            yield bar
        finally:
            self._depth -= 1
            self._bars.remove_task(bar.task)
            if self._depth == 0:
                self._bars.stop()
