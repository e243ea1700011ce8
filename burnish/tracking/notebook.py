"""Show a run in a notebook: its curves while it trains, and its result."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.text import Text

from burnish.tracking.console import ConsoleTracker
from burnish.tracking.curves import Curves
from burnish.tracking.rundir import ADAPTED, PARAMETERS, RunDirectory, parameters_text

HEADLINES = ("reward/mean", "train/loss", "val/reward", "val/loss")
"""The numbers of which a run's line, and a notebook, shows the last values."""
_SECONDS = 1.0  # least time between two pictures
_POINTS = 200
_WIDTH = 280
_HEIGHT = 90
_MARGIN = 52  # left of a curve, for its values
_LOG_LINES = 3


def last_values(curves: Curves) -> dict[str, float]:
    """Return the last values of those of `HEADLINES` that the run has."""
    series = {name: curves.finite(name) for name in HEADLINES}
    return {name: values[-1] for name, values in series.items() if values}


def run_in_words(directory: Path, model: Path | None) -> str:
    """Return a run's directory, steps, last reward or loss, model, and the model's parameters."""
    run = RunDirectory(directory)
    curves = Curves(run.metrics).refresh()
    numbers = [f"{name} {value:.4g}" for name, value in last_values(curves).items()]
    where = f"model {model}" if model else "no model here"
    environment = run.read_environment()
    sizes = [environment[key] for key in (PARAMETERS, ADAPTED) if key in environment]
    size = [parameters_text(*sizes)] if sizes else []  # runs of earlier versions do not say it
    return ", ".join([f"{directory}: {curves.last_step} steps", *numbers, where, *size])


def html_of_run(directory: Path, model: Path | None) -> str:
    """Return `run_in_words` above the run's curves, as HTML."""
    curves = Curves(RunDirectory(directory).metrics).refresh()
    return html_of(curves, run_in_words(directory, model))


def html_of(curves: Curves, title: str, lines: Sequence[str] = ()) -> str:
    """Return a run's curves as HTML that needs no script, below a title and above lines of text."""
    pictures = [
        _picture(name, curve.points(_POINTS, 0, curves.last_step))
        for name in HEADLINES
        if (curve := curves.by_name.get(name)) is not None and curves.finite(name)
    ]
    texts = "".join(f"<div style='white-space:pre-wrap'>{escape(line)}</div>" for line in lines)
    return (
        f"<div style='font:13px system-ui,sans-serif'><b>{escape(title)}</b>"
        f"<div style='display:flex;flex-wrap:wrap;gap:16px'>{''.join(pictures)}</div>"
        f"<div style='font-family:monospace;font-size:12px'>{texts}</div></div>"
    )


def _picture(name: str, points: Mapping[str, Sequence[Any]]) -> str:
    """Draw a curve as SVG: a metric's values by step."""
    pairs = [
        (step, value)
        for step, value in zip(points["steps"], points["values"], strict=True)
        if isinstance(value, float | int) and math.isfinite(value)
    ]
    first = pairs[0][0]
    last = pairs[-1][0]
    low = min(value for _, value in pairs)
    high = max(value for _, value in pairs)
    across = _WIDTH / max(1, last - first)
    up = _HEIGHT / ((high - low) or 1.0)
    line = " ".join(f"{(s - first) * across:.1f},{_HEIGHT - (v - low) * up:.1f}" for s, v in pairs)
    end_x, end_y = line.split()[-1].split(",")
    return (
        f"<figure style='margin:8px 0'><figcaption>{escape(name)} <b>{pairs[-1][1]:.4g}</b></figcaption>"
        f"<svg viewBox='{-_MARGIN} -8 {_WIDTH + _MARGIN + 8} {_HEIGHT + 28}' width='{_WIDTH + _MARGIN + 8}' role='img' aria-label='{escape(name)}'>"
        f"<polyline points='{line}' fill='none' stroke='#c2571a' stroke-width='2'/>"
        f"<circle cx='{end_x}' cy='{end_y}' r='3' fill='#c2571a'/>"
        f"<g fill='currentColor' font-size='10' opacity='.7'><text x='0' y='{_HEIGHT + 16}'>step {first}</text>"
        f"<text x='{_WIDTH}' y='{_HEIGHT + 16}' text-anchor='end'>{last}</text>"
        f"<text x='-8' y='4' text-anchor='end'>{high:.3g}</text><text x='-8' y='{_HEIGHT + 3}' text-anchor='end'>{low:.3g}</text></g></svg></figure>"
    )


class NotebookTracker(ConsoleTracker):
    """Draw a run's curves in the cell that trains, with the last lines of the console below."""

    def __init__(self, directory: Path, metrics: Path, total_steps: int) -> None:
        super().__init__(total_steps=total_steps)
        from IPython.display import HTML, display

        self._curves = Curves(metrics)  # reads new lines only
        self._title = f"{directory}, {total_steps} steps"
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._html = HTML
        self._handle: Any = display(HTML(""), display_id=True)
        self._drawn = 0.0

    def _print(self, step: int, parts: Mapping[str, Text]) -> None:
        self._lines.append(
            "  ".join(part.plain for part in (Text(f"step {step}"), *parts.values()))
        )
        if time.monotonic() >= self._drawn + _SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._handle.update(self._html(html_of(self._curves.refresh(), self._title, self._lines)))
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Draw the last steps."""
        self._draw()
