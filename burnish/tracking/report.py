"""`report.html`: a whole run on one page that needs only a browser.

Reads only the run directory, so it can be made again at any time, without torch. Plots are SVG; a short script shows values under
the pointer; nothing is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from burnish.tracking.atomic import write_atomically
from burnish.tracking.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Point,
    line_chart,
    stacked_chart,
)
from burnish.tracking.console import duration
from burnish.tracking.examples import choose_examples
from burnish.tracking.jsonl import read_metrics
from burnish.tracking.rundir import RunDirectory

State = Literal["running", "finished", "stopped", "failed", "unknown"]
"""How a run stands when its report is written; unknown where nobody can say."""

Series = dict[str, list[Point]]
"""Points by metric."""

_LEARNING = (
    ("Reward", ("reward/mean",)),
    ("Loss", ("actor/loss", "train/loss")),
    ("Policy loss", ("actor/pg_loss",)),
    ("Entropy, nats", ("actor/entropy",)),
    ("Gradient norm", ("actor/grad_norm", "train/grad_norm")),
    ("Response length, tokens", ("response_length/mean", "response_length/max")),
    ("Truncated responses, fraction", ("response_length/clip_ratio",)),
    ("Groups without variance, fraction", ("reward/zero_std_frac",)),
    ("KL", ("actor/ppo_kl", "actor/kl_loss")),
    ("Clipped tokens, fraction", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
    ("Value loss of the critic", ("critic/vf_loss",)),
    ("Variance that the critic explains, fraction", ("critic/explained_var",)),
    ("Generator against engine, KL", ("rollout/mismatch_kl",)),
    ("Learning rate", ("actor/lr", "train/lr", "critic/lr")),
)
_SPEED = (
    ("Tokens per second", ("perf/tokens_per_s",)),
    ("Model FLOPs utilisation", ("perf/mfu",)),
    ("Peak memory, GB", ("perf/max_memory_gb",)),
)
_FIRST_VALIDATION = ("accuracy", "mean@", "exact_match", "reward", "pass@")
"""What of the validation metrics stands in the header: the first of these there is."""
_HEADLINE = {
    "reward/mean": "Training reward",
    "train/loss": "Training loss",
    "actor/loss": "Training loss",
}
"""What stands beside it: the first of these there is, and what to call it."""
_LINES_PER_CHART = 6
_PLOT = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "right": WIDTH - RIGHT,
    "top": TOP,
    "bottom": HEIGHT - BOTTOM,
}
"""The plots' geometry, for the template: the size, and the edges of the drawing area."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    """What it is."""
    value: str
    """The number."""
    before: str = ""
    """Where it started, for numbers that changed."""
    note: str = ""
    """A second, small line."""


@dataclass(frozen=True, slots=True)
class Validation:
    """One row of the before-and-after table."""

    name: str
    """The metric, without `val/`."""
    before: float
    """First value."""
    after: float
    """Last value."""
    before_step: int
    """Step of the first value."""
    after_step: int
    """Step of the last value."""


def write_report(run_dir: Path, state: State = "unknown") -> Path:
    """Write `report.html` for a run directory, atomically, and return its path.

    Whatever is missing is left out. Raises `CorruptError` for a broken file.
    """
    run = RunDirectory(run_dir)
    series = _series(read_metrics(run.metrics))
    config_text = run.read_config() or ""
    config = _parsed(config_text)
    learning, speed, others = _charts(series)
    page = _template().render(
        name=config.get("name") or run_dir.resolve().name,
        state=state,
        subtitle=_subtitle(config, run.read_environment()),
        tiles=_tiles(series, config),
        notices=_notices(series),
        validation=_validation(series),
        sections=[("Learning", learning), ("Speed", speed)],
        others=others,
        examples=choose_examples(run.rollouts),
        config=config_text,
        environment={k: v for k, v in run.read_environment().items() if v is not None},
        plot=_PLOT,
    )
    write_atomically(run.report, page)
    return run.report


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("burnish.tracking", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    return environment.get_template("report.html.j2")


def _parsed(config_text: str) -> dict[str, Any]:
    """The configuration as a mapping; empty where it is not YAML, because the page shows its text anyway."""
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _series(rows: Iterable[dict[str, float]]) -> Series:
    """The points of every metric, by step; a step that occurs twice counts as it was last."""
    by_step: dict[float, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    series: Series = {}
    for step in sorted(by_step):
        for name, value in by_step[step].items():
            if name != "step":
                series.setdefault(name, []).append((step, value))
    return series


def _charts(series: Series) -> tuple[list[Chart], list[Chart], list[Chart]]:
    """The plots of learning, of speed, and of all that neither has a place for."""
    validation = _validation_groups(series)
    reward, *rest = _LEARNING
    learning = _drawn(series, [reward, *validation, *rest])
    timings = {name for name in series if name.startswith("timing_s/")}
    speed = [*_drawn(series, _SPEED), _timing_chart(series)]
    placed = {name for _, names in (*_LEARNING, *_SPEED, *validation) for name in names}
    left = sorted(series.keys() - placed - timings)
    others = _drawn(series, [(name, (name,)) for name in left])
    return learning, [chart for chart in speed if chart], others


def _drawn(series: Series, specs: Iterable[tuple[str, tuple[str, ...]]]) -> list[Chart]:
    charts = []
    for title, names in specs:
        there = [name for name in names if name in series]
        labels = [name.partition("/")[2] or name for name in there]
        if len(set(labels)) < len(labels):  # the policy's and the critic's
            labels = there
        chart = line_chart(
            title, {label: series[name] for label, name in zip(labels, there, strict=True)}
        )
        if chart is not None:
            charts.append(chart)
    return charts


def _validation_groups(series: Series) -> list[tuple[str, tuple[str, ...]]]:
    """Validation metrics that share a plot: those between 0 and 1 together, a loss or any other alone."""
    names = sorted((name for name in series if name.startswith("val/")), key=_validation_rank)
    fractions = [
        name
        for name in names
        if "loss" not in name and all(0 <= value <= 1 for _, value in series[name])
    ]
    groups = [
        ("Validation", tuple(fractions[first : first + _LINES_PER_CHART]))
        for first in range(0, len(fractions), _LINES_PER_CHART)
    ]
    alone = [name for name in names if name not in fractions]
    return groups + [(f"Validation: {name.removeprefix('val/')}", (name,)) for name in alone]


def _timing_chart(series: Series) -> Chart | None:
    """Where the seconds of a step went: its outermost spans, and what no span covered."""
    spans = {
        name.removeprefix("timing_s/"): dict(points)
        for name, points in series.items()
        if name.startswith("timing_s/") and name.count("/") == 1
    }
    steps = spans.pop("step", {})
    parts = {
        name: [(step, seconds.get(step, 0.0)) for step in steps] for name, seconds in spans.items()
    }
    largest = sorted(parts, key=lambda name: -sum(value for _, value in parts[name]))
    shown = {name: parts[name] for name in largest[: _LINES_PER_CHART - 1]}
    covered = [sum(values) for values in zip(*map(_values, shown.values()), strict=True)]
    covered = covered or [0.0] * len(steps)
    pairs = zip(steps.items(), covered, strict=True)
    shown["other"] = [(step, max(0.0, whole - part)) for (step, whole), part in pairs]
    return stacked_chart("Seconds per step", shown)


def _values(points: list[Point]) -> list[float]:
    return [value for _, value in points]


def _validation_rank(name: str) -> tuple[int, int, str]:
    """What is of all held-out data comes before what is of a source or a part."""
    ranks = [rank for rank, word in enumerate(_FIRST_VALIDATION) if word in name]
    return (name.count("/"), min(ranks, default=len(_FIRST_VALIDATION)), name)


def _validation(series: Series) -> list[Validation]:
    names = sorted((name for name in series if name.startswith("val/")), key=_validation_rank)
    rows = []
    for name in names:
        (first, before), (last, after) = series[name][0], series[name][-1]
        rows.append(Validation(name.removeprefix("val/"), before, after, int(first), int(last)))
    return rows


def _tiles(series: Series, config: dict[str, Any]) -> list[Tile]:
    tiles = []
    for row in _validation(series)[:1]:
        before = short(row.before) if row.after_step > row.before_step else ""
        tiles.append(Tile(f"Validation {row.name}", short(row.after), before, "held-out data"))
    headline = [name for name in _HEADLINE if name in series]
    if headline:
        tiles.append(_change_tile(_HEADLINE[headline[0]], series[headline[0]]))
    tiles.append(_steps_tile(series, config))
    seconds = [value for _, value in series.get("timing_s/step", [])]
    if seconds:
        note = f"{short(median(seconds))} s per step"
        tiles.append(Tile("Time in steps", duration(sum(seconds)), "", note))
    rates = [value for _, value in series.get("perf/tokens_per_s", []) if math.isfinite(value)]
    if rates:
        tiles.append(Tile("Tokens per second", short(median(rates)), "", "median step"))
    return tiles


def _notices(series: Series) -> list[str]:
    """What went wrong without stopping the run."""
    skipped = sum(_total(series, f"{role}/skipped") for role in ("actor", "critic", "train"))
    errors = _total(series, "reward/errors")
    notices = []
    if skipped:
        notices.append(
            f"Optimizer steps skipped for a gradient norm that was not finite: {skipped:,}"
        )
    if errors:
        notices.append(f"Rollouts on which a reward function failed: {errors:,}")
    return notices


def _total(series: Series, name: str) -> int:
    return round(sum(value for _, value in series.get(name, []) if value > 0))


def _change_tile(label: str, points: list[Point]) -> Tile:
    """The mean of the first and of the last 20th of a metric."""
    values = [value for _, value in points if math.isfinite(value)] or [math.nan]
    few = max(1, len(values) // 20)
    before = short(fmean(values[:few])) if len(values) > 1 else ""
    note = f"mean of {few} steps" if few > 1 else ""
    return Tile(label, short(fmean(values[-few:])), before, note)


def _steps_tile(series: Series, config: dict[str, Any]) -> Tile:
    last = max((int(points[-1][0]) for points in series.values()), default=0)
    total = config.get("steps")
    return Tile("Steps", f"{last:,}", "", f"of {total:,}" if isinstance(total, int) else "")


def _subtitle(config: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    model = config.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    processes = environment.get("processes", 1)
    device = environment.get("device")
    devices = f"{processes} × {device}" if processes != 1 else device
    started = str(environment.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    parts = (path, devices, environment.get("host"), started)
    return [str(part) for part in parts if part]


def short(value: float) -> str:
    """A number for people: three significant digits, thousands as such."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
