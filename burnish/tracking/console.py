"""One line per step on the terminal or in a log file.

Short names, at most `width` columns; the least watched numbers go first. `metrics.jsonl` has everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TextIO

from rich.console import Console
from rich.text import Text

_ETA_STEPS = 20
"""The time left is judged by the mean of this many steps."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A number that the line shows when the step has it."""

    label: str
    """What stands before it."""
    names: tuple[str, ...]
    """The metric; the first of these that the step has."""
    form: Callable[[float], str]
    """The number as text."""
    columns: int
    """Width the text is padded to, so that lines stand under each other."""


def _compact(value: float) -> str:
    """About three digits: 0.8123 -> 0.812, 12345 -> 12.3k, 0.00012 -> 1.2e-4."""
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


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 100 else duration(value)


_FIELDS = (
    _Field("reward", ("reward/mean",), _compact, 6),
    _Field("errors", ("reward/errors",), _whole, 1),
    _Field("loss", ("actor/pg_loss", "actor/loss", "train/loss"), _compact, 7),
    _Field("kl", ("actor/kl_loss", "actor/ppo_kl"), _compact, 7),
    _Field("ent", ("actor/entropy",), _compact, 5),
    _Field("grad", ("actor/grad_norm", "train/grad_norm"), _compact, 5),
    _Field("lr", ("actor/lr", "train/lr"), _scientific, 6),
    _Field("len", ("response_length/mean",), _whole, 4),
    _Field("tok/s", ("perf/tokens_per_s",), _compact, 5),
    _Field("", ("timing_s/step",), _seconds, 6),
)
_DROPPED_FIRST = ("val/reward", "ent", "kl", "len", "lr", "tok/s", "eta", "grad")
"""Labels, in the order in which they go where the line is too long."""


def duration(seconds: float) -> str:
    """A time to read at a glance, in two units: 8s, 3m20s, 2h05m, 4d07h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


class ConsoleTracker:
    """Prints a line per step, in colour on a terminal.

    `total_steps` adds `step/total` and the time left. `stream` is standard output by default.
    """

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        stream: TextIO | None = None,
        width: int = 120,
    ) -> None:
        self._total = total_steps
        self._console = Console(file=stream, highlight=False)
        self._width = width
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the step's line."""
        self._console.print(self._line(step, values), soft_wrap=True)
        self._console.file.flush()

    def sync(self) -> None:
        """Nothing is recorded."""

    def close(self) -> None:
        """Nothing is held."""

    def _line(self, step: int, values: Mapping[str, float]) -> Text:
        parts = {"step": _labelled("step", self._position(step), "bold cyan")}
        for field in _FIELDS:
            name = next((name for name in field.names if name in values), None)
            if name is not None and (field.label != "errors" or values[name]):
                parts[field.label] = _shown(field, values[name])
        parts |= self._time_left(step, values) | _validation(values)
        for label in _DROPPED_FIRST:
            if _columns(parts) > self._width:
                parts.pop(label, None)
        line = Text("  ").join(parts.values())
        line.rstrip()
        line.truncate(self._width, overflow="ellipsis")
        return line

    def _position(self, step: int) -> str:
        if self._total is None:
            return str(step)
        return f"{step:>{len(str(self._total))}}/{self._total}"

    def _time_left(self, step: int, values: Mapping[str, float]) -> dict[str, Text]:
        if "timing_s/step" in values:
            self._recent.append(values["timing_s/step"])
        if self._total is None or not self._recent:
            return {}
        left = fmean(self._recent) * max(0, self._total - step)
        return {"eta": _labelled("eta", f"{duration(left):<6}")}


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label} " if label else "", "dim"), (text, style))


def _shown(field: _Field, value: float) -> Text:
    bad = field.label == "errors" or not math.isfinite(value)
    style = "bold red" if bad else "green" if field.label == "reward" else ""
    return _labelled(field.label, f"{field.form(value):>{field.columns}}", style)


def _validation(values: Mapping[str, float]) -> dict[str, Text]:
    """`val/mean@4 0.81`: the validation numbers of a step that has them, without lengths and those of single sources."""
    return {
        name: _labelled(name, _compact(value), "bold green")
        for name, value in values.items()
        if name.startswith("val/") and name.count("/") == 1
    }


def _columns(parts: Mapping[str, Text]) -> int:
    return sum(part.cell_len + 2 for part in parts.values()) - 2
