import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from burnish.tracking.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    line_chart,
    smooth,
    stacked_chart,
    thin,
    tick_label,
    ticks,
)

any_numbers = st.lists(st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf]), max_size=80)


def vertices(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def test_the_path_goes_through_every_point() -> None:
    chart = line_chart("Loss", {"loss": [(0, 4.0), (5, 2.0), (10, 1.0)]})
    assert chart is not None
    (line,) = chart.lines
    left, right, low = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    found = vertices(line.path)
    assert [x for x, _ in found] == [left, (left + right) / 2, right]
    room = 4.0 * 0.06  # the axis starts at 0, because 0 is near
    scale = (low - TOP) / (4.0 + room)
    assert [y for _, y in found] == pytest.approx([low - v * scale for v in (4, 2, 1)], abs=0.06)
    assert line.dots == found
    assert line.last == 1.0


def test_values_that_are_not_finite_break_the_line() -> None:
    chart = line_chart("x", {"x": [(1, 1.0), (2, math.nan), (3, 2.0), (4, 1.0)]})
    assert chart is not None
    assert [part.count("L") for part in chart.lines[0].path.split("M")[1:]] == [0, 1]
    assert chart.hover()["lines"][0]["points"][1] == [2, None]


@pytest.mark.parametrize("points", [[], [(1.0, math.nan)]])
def test_nothing_to_show_is_no_chart(points: list[tuple[float, float]]) -> None:
    assert line_chart("x", {"x": points}) is None
    assert line_chart("x", {}) is None
    assert stacked_chart("x", {"x": []}) is None


def test_one_point_is_a_dot() -> None:
    chart = line_chart("x", {"x": [(1, 0.0)]})
    assert chart is not None
    assert chart.lines[0].path == ""
    assert len(chart.lines[0].dots) == 1


@given(any_numbers)
@example([math.nan, *[0.0] * 19, -382482.0, -247823.0])
def test_everything_drawn_lies_within_the_plot(values: list[float]) -> None:
    chart = line_chart("x", {"x": list(enumerate(values))})
    if chart is None:
        assert not any(map(math.isfinite, values))
        return
    drawn = vertices(chart.lines[0].path) + vertices(chart.lines[0].smooth) + chart.lines[0].dots
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in drawn)
    assert all(TOP <= y <= HEIGHT - BOTTOM for y, _ in chart.y_ticks)


@given(any_numbers)
def test_smoothing_is_the_weighted_mean_of_its_formula(values: list[float]) -> None:
    beta = 1 - 2 / (max(1.0, len(values) / 15) + 1)
    for t, average in enumerate(smooth(values)):
        weights = [beta ** abs(t - i) if math.isfinite(v) else 0.0 for i, v in enumerate(values)]
        total = sum(w * v for w, v in zip(weights, values, strict=True) if w)
        if sum(weights) == 0:
            assert math.isnan(average)
        elif sum(weights) > 1e-3:
            assert average == pytest.approx(total / sum(weights), rel=1e-6, abs=1e-3)


def test_noise_is_smoothed_and_a_schedule_is_not() -> None:
    rng = np.random.default_rng(0)
    noisy = [(i, float(v)) for i, v in enumerate(rng.normal(size=200))]
    warmup = [(i, min(1.0, i / 50)) for i in range(200)]
    chart = line_chart("x", {"noisy": noisy, "lr": warmup})
    assert chart is not None
    assert chart.lines[0].smooth
    assert not chart.lines[1].smooth


@given(st.lists(st.floats(allow_infinity=True, allow_nan=True), max_size=300), st.integers(10, 100))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 0)
    if values:
        assert {0, len(values) - 1} <= set(kept)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[index] for index in kept if math.isfinite(values[index])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_areas_stack_up_to_the_sum() -> None:
    chart = stacked_chart("s", {"a": [(1, 1.0), (2, 1.0)], "b": [(1, 3.0), (2, 1.0)]})
    assert chart is not None
    below, above = (vertices(line.area) for line in chart.lines)
    assert above[2:] == below[:2][::-1]  # b stands on a
    low = HEIGHT - BOTTOM
    assert (low - above[0][1]) / (low - below[0][1]) == pytest.approx(4.0, abs=0.02)
    assert [line.last for line in chart.lines] == [1.0, 1.0]


def test_long_series_are_thinned() -> None:
    points = [(float(i), math.sin(i)) for i in range(10_000)]
    lines, areas = line_chart("x", {"x": points}), stacked_chart("x", {"x": points})
    assert lines is not None
    assert areas is not None
    assert (
        len(vertices(lines.lines[0].path)) == len(lines.hover()["lines"][0]["points"]) <= MAX_POINTS
    )
    assert len(areas.lines[0].points) == MAX_POINTS // 2


@given(st.floats(-1e3, 1e3), st.floats(1e-1, 1e6), st.integers(3, 8))
def test_ticks_are_round_and_within(low: float, extent: float, about: int) -> None:
    found = ticks(low, low + extent, about)
    assert about / 2.2 - 1 <= len(found) <= 2 * about
    assert all(low - 1e-6 * extent <= tick <= low + extent * (1 + 1e-6) for tick in found)
    for before, after in pairwise(found):
        digit = f"{after - before:.6e}"[:8]
        assert digit in {"1.000000", "2.000000", "5.000000"}


@pytest.mark.parametrize(
    ("value", "largest", "label"),
    [
        (0.0, 1, "0"),
        (0.25, 1, "0.25"),
        (2000, 10000, "2k"),
        (1.5e6, 2e6, "1.5M"),
        (1e-6, 1e-6, "1e-06"),
    ],
)
def test_labels(value: float, largest: float, label: str) -> None:
    assert tick_label(value, [0.0, largest]) == label
