"""Show progress of a run and of its phases.

On a terminal, a thread draws bars below the lines that are printed. Elsewhere a long phase prints a plain line, so that a hang shows.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import StringIO
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

_DRAWS_A_SECOND = 5
# Seconds between a phase's lines without a terminal, and before the first line of the first phase with a name.
_LINE_SECONDS = 30.0
_FIRST_SECONDS = 2.0
_SPEED_SECONDS = 3600.0  # the time left is estimated from the speed over this time


def leave_lost_terminal() -> None:
    """Redirect output to a closed terminal to /dev/null from now on."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                _discard_from(descriptor)


def _discard_from(descriptor: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


class Screen:
    """A stream that drops output to a closed terminal or pipe, so that a run goes on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = StringIO() if stream is None else stream  # None: started without this stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write as a file does."""
        self._call(partial(self._stream.write, text))

    def flush(self) -> None:
        """Flush as a file does."""
        self._call(self._stream.flush)

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            _discard_from(self._stream.fileno())


class Bar:
    """A running phase. Each advance calls `show` with its count and age."""

    def __init__(
        self,
        show: Callable[[float, float], None],
        clock: Callable[[], float],
        moved: Callable[[], None],
    ) -> None:
        self._show = show
        self._clock = clock
        self._moved = moved
        self._done = 0.0
        self._began = clock()

    def advance(self, count: float = 1) -> None:
        """Count more of the phase's units as done."""
        self._done += count
        if count:
            self._moved()
        self._show(self._done, self._clock() - self._began)


class Progress:
    """Show phases on `stream` (default: standard error) if `enabled` (main rank). Phases may nest. Each advance calls `moved`."""

    def __init__(
        self,
        enabled: bool,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.moved = moved
        self._clock = clock
        self._begun = set[str]()
        screen = cast(TextIO, Screen(stream or sys.stderr))
        self._console = Console(file=screen, quiet=not enabled, force_jupyter=False)
        self._bars = RichProgress(
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("·", style="dim"),
            TimeRemainingColumn(compact=True),
            TextColumn("left", style="dim"),
            console=self._console,
            transient=True,
            refresh_per_second=_DRAWS_A_SECOND,
            speed_estimate_period=_SPEED_SECONDS,
            # Lines that standard output sends to a file must not go to the terminal.
            redirect_stdout=Screen(sys.stdout).isatty(),
        )

    @contextmanager
    def phase(
        self, name: str, total: float | None = None, *, done: float = 0, lines: bool = True
    ) -> Iterator[Bar]:
        """Show a bar from `done` up to `total` (None: unknown) in the block and its thread; without `lines`, on a terminal only."""
        if not self._console.is_terminal or self._console.quiet:
            of_total = "" if total is None else f"/{total:g}"
            due = _LINE_SECONDS if name in self._begun else _FIRST_SECONDS
            self._begun.add(name)

            def line(counted: float, seconds: float) -> None:
                nonlocal due
                if lines and seconds >= due:
                    due = seconds + _LINE_SECONDS
                    sentence = f"{name} {done + counted:g}{of_total} after {seconds:.0f}s"
                    self._console.print(sentence, soft_wrap=True, highlight=False, markup=False)

            yield Bar(line, self._clock, self.moved)
            return
        task = self._bars.add_task(name, total=total, completed=int(done))
        self._bars.start()
        try:
            show = partial(self._bars.update, task)
            yield Bar(lambda counted, _: show(completed=done + counted), self._clock, self.moved)
        finally:
            self._bars.refresh()
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()
