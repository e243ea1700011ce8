"""Geometry of the report's plots: numbers in, SVG paths and tick marks out.

Pure functions, quick for tens of thousands of steps: a line keeps at most `MAX_POINTS` points, with the extremes of every stretch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

Point = tuple[float, float]
"""(step, value)."""

WIDTH, HEIGHT = 420, 190
"""Size of a plot in SVG units."""
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 22
"""Margins around the drawing area, for the tick labels."""
MAX_POINTS = 400
"""Most points drawn for one line."""
_SMOOTH_FROM = 20
"""Lines of fewer points are drawn as they are."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a plot."""

    label: str
    """Its name in the legend."""
    points: list[Point]
    """What is drawn, thinned out."""
    path: str
    """The points as an SVG path, broken where a value is not finite; "" for a single point."""
    smooth: str
    """The smoothed points as an SVG path; "" where there are too few to smooth."""
    dots: list[Point]
    """Pixel positions of points to mark, where there are few."""
    area: str
    """Outline of the area under a stacked line; "" otherwise."""
    last: float
    """The last finite value."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot, ready for the template."""

    title: str
    """What it shows, with its unit."""
    lines: list[Line]
    """At least one."""
    x_ticks: list[tuple[float, str]]
    """Pixel and label."""
    y_ticks: list[tuple[float, str]]
    """Pixel and label."""
    scale: tuple[float, float, float, float]
    """First and last step, least and largest value of the drawing area."""
    stacked: bool = False
    """Whether lines are added on top of each other."""

    def hover(self) -> dict[str, Any]:
        """What the page's script needs to show values under the pointer; None for not finite."""
        lines = [
            {
                "label": line.label,
                "points": [[step, _short(value)] for step, value in line.points],
            }
            for line in self.lines
        ]
        return {"scale": self.scale, "lines": lines, "stacked": self.stacked}


@dataclass(frozen=True, slots=True)
class _Scale:
    """From data to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, step: float) -> float:
        share = (step - self.x_low) / (self.x_high - self.x_low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def line_chart(title: str, series: Mapping[str, Sequence[Point]]) -> Chart | None:
    """Each series as a line. None where there is no finite value at all."""
    finite = {name: points for name, points in series.items() if _finite(points)}
    if not finite:
        return None
    scale = _fit([point for points in finite.values() for point in points])
    lines = [_line(label, points, scale) for label, points in finite.items()]
    return _chart(title, lines, scale)


def stacked_chart(title: str, series: Mapping[str, Sequence[Point]]) -> Chart | None:
    """Stack series of equal steps as areas, the first at the bottom; None if there is nothing to show."""
    means = {name: _bucket_means(points) for name, points in series.items() if points}
    if not means:
        return None
    tops: list[list[Point]] = []
    for points in means.values():
        below = tops[-1] if tops else [(step, 0.0) for step, _ in points]
        pairs = zip(points, below, strict=True)
        tops.append([(step, value + under) for (step, value), (_, under) in pairs])
    scale = _fit([(step, 0.0) for step, _ in tops[-1]] + tops[-1])
    lines = []
    for index, (label, points) in enumerate(means.items()):
        below = tops[index - 1] if index else [(step, 0.0) for step, _ in points]
        outline = _path(tops[index] + below[::-1], scale) + "Z"
        lines.append(Line(label, points, "", "", [], outline, points[-1][1]))
    return _chart(title, lines, scale, stacked=True)


def _chart(title: str, lines: list[Line], scale: _Scale, *, stacked: bool = False) -> Chart:
    steps = [tick for tick in ticks(scale.x_low, scale.x_high, 6) if tick == int(tick)]
    values = ticks(scale.y_low, scale.y_high, 4)
    return Chart(
        title,
        lines,
        [(scale.x(tick), tick_label(tick, steps)) for tick in steps],
        [(scale.y(tick), tick_label(tick, values)) for tick in values],
        (scale.x_low, scale.x_high, scale.y_low, scale.y_high),
        stacked,
    )


def _line(label: str, points: Sequence[Point], scale: _Scale) -> Line:
    smoothed = smooth([value for _, value in points])
    kept = thin([value for _, value in points], MAX_POINTS)
    shown = [points[index] for index in kept]
    few = len(points) <= _SMOOTH_FROM
    calm = few or _is_calm([value for _, value in _finite(points)])
    averages = [] if calm else [(points[index][0], smoothed[index]) for index in kept]
    dots = [(scale.x(step), scale.y(value)) for step, value in _finite(shown)] if few else []
    path = _path(shown, scale) if len(shown) > 1 else ""
    last = _finite(points)[-1][1]
    return Line(label, shown, path, _path(averages, scale), dots, "", last)


def _short(value: float) -> float | None:
    """Five digits, to keep the page small."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _path(points: Sequence[Point], scale: _Scale) -> str:
    """`M` where a stretch of finite values starts, `L` within it."""
    parts = []
    pen = "M"
    for step, value in points:
        if math.isfinite(value):
            parts.append(f"{pen}{scale.x(step):g} {scale.y(value):g}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _fit(points: Sequence[Point]) -> _Scale:
    """A scale with some air above and below; from 0 where 0 is not far away."""
    steps = [step for step, _ in points]
    values = [value for _, value in _finite(points)]
    low, high = min(values), max(values)
    if low >= 0 and low <= 0.4 * high:
        low = 0.0
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    low = low if low == 0 and high > 0 else low - room
    x_low, x_high = min(steps), max(steps)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    return _Scale(x_low, x_high, low, high + room)


def _is_calm(values: Sequence[float]) -> bool:
    """Whether a line needs no smoothing, as a schedule's: its ups and downs add up to few ranges."""
    travelled = sum(abs(after - before) for before, after in pairwise(values))
    return travelled <= 2.5 * (max(values) - min(values))


def smooth(values: Sequence[float]) -> list[float]:
    """Average over about a 15th of the values, without lag: s_t = Σ_i β^|t−i| v_i / Σ_i β^|t−i|.

    Only finite values count; NaN without any.
    """
    span = max(1.0, min(len(values) / 15, 100.0))
    keep = 1 - 2 / (span + 1)
    past = _decayed(values, keep)
    future = _decayed(values[::-1], keep)[::-1]
    averages = []
    for value, (total, weight), (later, later_weight) in zip(values, past, future, strict=True):
        own, own_weight = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)
        all_weight = weight + later_weight - own_weight
        averages.append((total + later - own) / all_weight if all_weight else math.nan)
    return averages


def _decayed(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """For each value, (Σ β^(t−i) v_i, Σ β^(t−i)) over the finite values up to it."""
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1.0
        sums.append((total, weight))
    return sums


def thin(values: Sequence[float], most: int) -> list[int]:
    """Indices of at most `most` values that keep the shape: first, last, and each bucket's extremes."""
    count = len(values)
    if count <= most:
        return list(range(count))
    buckets = most // 2 - 1
    kept = {0, count - 1}
    for bucket in range(buckets):
        inside = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [index for index in inside if math.isfinite(values[index])] or inside[:1]
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def _bucket_means(points: Sequence[Point]) -> list[Point]:
    buckets = min(len(points), MAX_POINTS // 2)
    means = []
    for bucket in range(buckets):
        first, end = bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets
        means.append((points[first][0], fmean(value for _, value in points[first:end])))
    return means


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about `about` round numbers (1, 2, 5 times a power of ten apart) between `low` and `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    bounds = ((1.5, 1), (3.5, 2), (7.5, 5), (math.inf, 10))
    step = power * next(factor for bound, factor in bounds if rough / power < bound)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)
    ]


def tick_label(value: float, all_ticks: Sequence[float]) -> str:
    """`value` in the unit of the largest tick: 0.05, 1.5, 20k, 1e-06."""
    largest = max(abs(tick) for tick in all_ticks)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= limit and value:
            return f"{value / divisor:g}{unit}"
    return f"{value:g}"
