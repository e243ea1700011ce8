"""Print one line per step, and write it to the log. A line that is too long drops the least important numbers; `metrics.jsonl` has all."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from burnish.tracking import logs
from burnish.tracking.progress import Screen
from burnish.tracking.trackers import Tracker

_WIDTH = 120  # columns of a line in a file
_ETA_STEPS = 20  # the time left is estimated from their mean


def _compact(value: float) -> str:
    """Return about three digits: 0.8123 -> 0.812, 12345 -> 12.3k, 0.00012 -> 1.2e-4."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{unit}"
    if 0 < size < 0.01:
        return _scientific(value)
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 100 else duration(value)


_FIELDS = (
    # Label, metrics of which the first that exists is shown, format, columns that the text is padded to.
    ("reward", ("reward/mean",), _compact, 6),
    ("errors", ("reward/errors",), "{:.0f}".format, 1),
    ("turns", ("environment/turns",), "{:.1f}".format, 3),
    ("failed", ("environment/failed",), "{:.0f}".format, 1),
    ("loss", ("actor/pg_loss", "actor/loss", "train/loss"), _compact, 7),
    ("kl", ("actor/kl_loss",), _compact, 7),
    ("ppo_kl", ("actor/ppo_kl",), _compact, 7),
    ("ent", ("actor/entropy",), _compact, 5),
    ("grad", ("actor/grad_norm", "train/grad_norm"), _compact, 5),
    ("lr", ("actor/lr", "train/lr"), _scientific, 6),
    ("len", ("response_length/mean",), "{:.0f}".format, 4),
    ("tok/s", ("perf/tokens_per_s",), _compact, 5),
    ("", ("timing_s/step",), _seconds, 6),
)
_FAILURES = ("errors", "failed")  # not shown if there are none
_DROPPED_FIRST = ("ent", "ppo_kl", "kl", "len", "lr", "tok/s", "eta", "turns", "grad")


def duration(seconds: float) -> str:
    """Return a time in two units: 8s, 3m20s, 2h05m, 4d07h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


class ConsoleTracker(Tracker):
    """Print a line for every `every`-th step, the first, the last, and validations. Default `width`: the terminal's, or 120."""

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        every: int = 1,
        stream: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        self._total = total_steps
        self._every = every
        self._width = width
        self._stream = stream
        screen = cast(TextIO, Screen(stream or sys.stdout))
        # In a notebook, rich would display an empty block beside each line.
        self._console = Console(file=screen, highlight=False, force_jupyter=False)
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the step's line and its validation's line. The log has them of all steps, and whole."""
        if "timing_s/step" in values:
            self._recent.append(values["timing_s/step"])
        is_due = step % self._every == 0 or step in (1, self._total)
        # A validation's numbers, without lengths and those of single sources: val/mean@4 0.81.
        measured = {
            name: _labelled(name, _compact(value), "bold green")
            for name, value in values.items()
            if name.startswith("val/") and name.count("/") == 1
        }
        has_line = bool(step or not measured)
        parts = self._parts(step, values) if has_line else {}
        if is_due and has_line:
            self._print(step, parts)
        if measured:
            self._print(step, measured)
        if logs.descriptor() is not None:
            words = (part.plain.split() for part in (parts | measured).values())
            logs.add("  ".join(map(" ".join, words)), logging.INFO)

    def _parts(self, step: int, values: Mapping[str, float]) -> dict[str, Text]:
        parts = {}
        for label, names, form, columns in _FIELDS:
            value = next((values[name] for name in names if name in values), None)
            # Conversations that failed are among the errors.
            alike = values.get("environment/failed", 0) if label == "errors" else 0
            if value is None or (label in _FAILURES and value == alike):
                continue
            bad = label in _FAILURES or not math.isfinite(value)
            style = "bold red" if bad else "green" if label == "reward" else ""
            parts[label] = _labelled(label, f"{form(value):>{columns}}", style)
        if self._total is not None and self._recent:
            left = fmean(self._recent) * max(0, self._total - step)
            parts["eta"] = _labelled("eta", f"{duration(left):<6}")
        return parts

    def _print(self, step: int, parts: Mapping[str, Text]) -> None:
        total = str(self._total or "")
        place = f"{step:>{len(total)}}/{total}" if total else str(step)
        shown = {"step": _labelled("step", place, "bold cyan"), **parts}
        is_terminal = self._console.is_terminal
        width = self._width or (self._console.width if is_terminal else _WIDTH)
        for label in _DROPPED_FIRST:
            if sum(part.cell_len + 2 for part in shown.values()) - 2 > width:
                shown.pop(label, None)
        line = Text("  ").join(shown.values())
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
        with self._console.capture() as captured:
            self._console.print(line, soft_wrap=True)
        # A `Console` would bypass the redirection that keeps progress bars below the lines.
        screen = Screen(self._stream or sys.stdout)
        screen.write(captured.get())
        screen.flush()


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label} " if label else "", "dim"), (text, style))
