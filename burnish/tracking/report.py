"""Write `report.html`: a whole run on one page that needs only a browser.

It needs only the run's directory, at any time, without torch. A script in the page, which fetches
nothing, draws the charts from JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from burnish.tracking.console import duration
from burnish.tracking.rollouts import read_rollouts, rollout_files
from burnish.tracking.rundir import RunDirectory, write_atomically
from burnish.tracking.trackers import numbers, read_metrics

State = Literal["running", "finished", "stopped", "failed", "unknown"]
"""How a run stands when its report is written; unknown if nobody can say."""
Points = list[tuple[float, float]]
"""(step, value) pairs of a metric, by ascending step."""
Series = dict[str, Points]
"""Points by metric."""
Chart = dict[str, Any]
"""A chart as the page's script takes it: `title`, `lines` (`label`, `points`, `smooth`), and `stacked`."""
Row = dict[str, Any]
"""A rollout as the page shows it."""

MAX_POINTS = 400
"""Points of a line that are drawn."""
READ_BYTES = 32_000_000
"""Size of the rollout files that are read; the newest and the oldest file are always read."""
_SMOOTH_FROM = 20
_LINES_PER_CHART = 6
_TEXT_LIMIT = 3000
_EXAMPLES = 3

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
# The first of these that the validation metrics have is in the header.
_HEADLINE = {
    "reward/mean": "Training reward",
    "train/loss": "Training loss",
    "actor/loss": "Training loss",
}
# Beside it is the first of these that there is, under this label.
_ABSENT: Row = {
    "answer": None,
    "reward_parts": {},
    "reward_error": None,
    "advantage": math.nan,
    "stop_reason": "",
    "length": 0,
}


def write_report(run_dir: Path, state: State = "unknown") -> Path:
    """Write `report.html` for a run's directory, atomically, and return its path.

    Leaves out missing files. Raises `CorruptError` for a broken file.
    """
    run = RunDirectory(run_dir)
    series = _series(read_metrics(run.metrics))
    config_text = run.config.read_text("utf-8") if run.config.exists() else ""
    config = _parsed(config_text)
    validation = sorted((name for name in series if name.startswith("val/")), key=_validation_rank)
    learning, speed, others = _charts(series, validation)
    environment = run.read_environment()
    page = _template().render(
        name=config.get("name") or run_dir.resolve().name,
        state=state,
        subtitle=_subtitle(config, environment),
        tiles=_tiles(series, validation, config.get("steps")),
        notices=_notices(series),
        validation={name.removeprefix("val/"): series[name] for name in validation},
        sections=[("Learning", learning), ("Speed", speed)],
        others=others,
        examples=choose_examples(run.rollouts),
        config=config_text,
        environment={k: v for k, v in environment.items() if v is not None},
    )
    write_atomically(run.report, page)
    return run.report


@cache
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
    """Return the configuration, empty unless it is YAML: the page shows its text anyway."""
    try:
        config = yaml.load(config_text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _series(rows: Iterable[dict[str, float]]) -> Series:
    """Return every metric's points; of a repeated step, the last values count."""
    by_step: dict[float, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    series: Series = {}
    for step in sorted(by_step):
        for name, value in by_step[step].items():
            if name != "step":
                series.setdefault(name, []).append((step, value))
    return series


def _validation_rank(name: str) -> tuple[int, int, str]:
    ranks = [rank for rank, word in enumerate(_FIRST_VALIDATION) if word in name]
    return (name.count("/"), min(ranks, default=len(_FIRST_VALIDATION)), name)


def _charts(series: Series, validation: list[str]) -> tuple[list[Chart], list[Chart], list[Chart]]:
    groups = _validation_groups(series, validation)
    reward, *rest = _LEARNING
    seconds = {name: points for name, points in series.items() if name.startswith("timing_s/")}
    placed = {name for _, names in (*_LEARNING, *_SPEED, *groups) for name in names}
    others = sorted(series.keys() - placed - seconds.keys())
    return (
        _drawn(series, [reward, *groups, *rest]),
        [*_drawn(series, _SPEED), *_timing_chart(seconds)],
        _drawn(series, [(name, (name,)) for name in others]),
    )


def _validation_groups(series: Series, names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return validation metrics that share a chart: all fractions, else one."""
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


def _drawn(series: Series, specs: Iterable[tuple[str, tuple[str, ...]]]) -> list[Chart]:
    """Return a chart per title and metrics that have a finite value."""
    charts = []
    for title, names in specs:
        there = [n for n in names if any(math.isfinite(v) for _, v in series.get(n, ()))]
        labels = [name.partition("/")[2] or name for name in there]
        if len(set(labels)) < len(labels):  # the policy's and the critic's
            labels = there
        lines = [_line(label, series[name]) for label, name in zip(labels, there, strict=True)]
        if lines:
            charts.append({"title": title, "lines": lines, "stacked": False})
    return charts


def _line(label: str, points: Points) -> dict[str, Any]:
    """Return a line thinned to `MAX_POINTS`, with averages if it is long and noisy."""
    steps, values = np.array(points, dtype=np.float64).T
    kept = thinned(values, MAX_POINTS)
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        # The ups and downs of a line that needs no smoothing, as a schedule's, add up to few ranges.
        calm = np.abs(np.diff(finite)).sum() <= 2.5 * np.ptp(finite)
        averages = [] if calm or len(values) <= _SMOOTH_FROM else smooth(values)[kept].tolist()
    drawn = zip(steps[kept].tolist(), values[kept].tolist(), strict=True)
    return {
        "label": label,
        "points": [(step, _short_json(value)) for step, value in drawn],
        "smooth": [_short_json(value) for value in averages],
    }


def _timing_chart(seconds: Series) -> list[Chart]:
    """Stack a step's outermost spans and the time outside them."""
    spans = {n.removeprefix("timing_s/"): dict(p) for n, p in seconds.items() if n.count("/") == 1}
    steps = spans.pop("step", {})
    if not steps:
        return []
    rows = {name: np.array([x.get(step, 0.0) for step in steps]) for name, x in spans.items()}
    largest = sorted(rows, key=lambda name: -rows[name].sum())[: _LINES_PER_CHART - 1]
    shown = {name: rows[name] for name in largest}
    covered = sum(shown.values(), np.zeros(len(steps)))
    shown["other"] = np.maximum(np.array(list(steps.values())) - covered, 0.0)
    buckets = min(len(steps), MAX_POINTS // 2)
    first = [bucket[0].item() for bucket in np.array_split(np.array(list(steps)), buckets)]
    lines = []
    for name, values in shown.items():
        means = [_short_json(part.mean().item()) for part in np.array_split(values, buckets)]
        lines.append({"label": name, "points": list(zip(first, means, strict=True)), "smooth": []})
    return [{"title": "Seconds per step", "lines": lines, "stacked": True}]


def _short_json(value: float) -> float | None:
    """Return five digits, to keep the page small; None for NaN and infinities."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def smooth(values: np.ndarray) -> np.ndarray:
    """Average over about a 15th of the values, without lag: s_t = Σ_i β^|t−i| v_i / Σ_i β^|t−i|.

    Only finite values count; NaN without any.
    """
    span = min(max(len(values) / 15, 1.0), 100.0)
    reach = min(len(values) - 1, math.ceil(5 * span))
    kernel = (1 - 2 / (span + 1)) ** np.abs(np.arange(-reach, reach + 1))
    finite = np.isfinite(values)
    totals = np.convolve(np.where(finite, values, 0.0), kernel)[reach:][: len(values)]
    weights = np.convolve(finite.astype(np.float64), kernel)[reach:][: len(values)]
    averages = np.full(len(values), np.nan)
    np.divide(totals, weights, out=averages, where=weights > 0)
    return averages


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return ascending indices of at most `most` values: first, last, and each bucket's extremes."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for bucket in np.array_split(np.arange(count), most // 2 - 1):
        finite = bucket[np.isfinite(values[bucket])]
        bucket = finite if len(finite) else bucket[:1]
        kept |= {int(bucket[values[bucket].argmin()]), int(bucket[values[bucket].argmax()])}
    return np.array(sorted(kept))


def _tiles(series: Series, validation: list[str], total: Any) -> list[tuple[str, ...]]:
    tiles: list[tuple[str, ...]] = []
    for name in validation[:1]:
        points = series[name]
        before = short(points[0][1]) if len(points) > 1 else ""
        label = f"Validation {name.removeprefix('val/')}"
        tiles.append((label, short(points[-1][1]), before, "held-out data"))
    for name in [name for name in _HEADLINE if name in series][:1]:
        values = _finite(series, name) or [math.nan]
        few = max(1, len(values) // 20)
        before = short(fmean(values[:few])) if len(values) > 1 else ""
        note = f"mean of {few} steps" if few > 1 else ""
        tiles.append((_HEADLINE[name], short(fmean(values[-few:])), before, note))
    last = max((int(points[-1][0]) for points in series.values()), default=0)
    tiles.append(("Steps", f"{last:,}", "", f"of {total:,}" if isinstance(total, int) else ""))
    if seconds := _finite(series, "timing_s/step"):
        note = f"{short(median(seconds))} s per step"
        tiles.append(("Time in steps", duration(sum(seconds)), "", note))
    if rates := _finite(series, "perf/tokens_per_s"):
        tiles.append(("Tokens per second", short(median(rates)), "", "median step"))
    return tiles


def _finite(series: Series, name: str) -> list[float]:
    return [value for _, value in series.get(name, ()) if math.isfinite(value)]


def _notices(series: Series) -> list[str]:
    def total(*names: str) -> int:
        return round(sum(x for name in names for _, x in series.get(name, ()) if x > 0))

    counts = {
        "Optimizer steps skipped for a gradient norm that was not finite": total(
            "actor/skipped", "critic/skipped", "train/skipped"
        ),
        "Rollouts on which a reward function failed": total("reward/errors"),
    }
    return [f"{said}: {count:,}" for said, count in counts.items() if count]


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
    """Return three significant digits, or all digits and separators from 1,000 on."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def choose_examples(directory: Path, count: int = _EXAMPLES) -> dict[str, Any] | None:
    """Return up to `count` rollouts of each kind from a directory of rollouts, if any.

    `best` and `worst` are of the newest `step`, one per prompt. `changed` has the prompts whose
    mean reward changed most between their earliest and latest answers: an early and a late rollout,
    and both means. Raises `CorruptError` for a broken file.
    """
    groups: dict[int, dict[int, list[Row]]] = {}
    for path in _within_budget([path for _, path in rollout_files(directory)]):
        for row in map(_row, read_rollouts(path)):
            groups.setdefault(row["prompt_index"], {}).setdefault(row["step"], []).append(row)
    if not groups:
        return None
    by_prompt = [groups[index] for index in sorted(groups)]
    newest = max(step for by_step in by_prompt for step in by_step)
    latest = [by_step[newest] for by_step in by_prompt if newest in by_step]
    best = sorted((max(group, key=_order) for group in latest), key=lambda row: -_order(row))
    worst = sorted((min(group, key=_order) for group in latest), key=_order)
    return {
        "step": newest,
        "best": best[:count],
        "worst": worst[:count],
        "changed": _changes(by_prompt, count),
    }


def _within_budget(paths: list[Path]) -> list[Path]:
    """Return the newest, oldest, second newest, ... up to `READ_BYTES`."""
    alternating = [path for pair in zip(reversed(paths), paths, strict=True) for path in pair]
    chosen: list[Path] = []
    spent = 0
    for path in alternating[: len(paths)]:
        spent += path.stat().st_size
        if len(chosen) >= 2 and spent > READ_BYTES:
            break
        chosen.append(path)
    return chosen


def _changes(
    by_prompt: Iterable[dict[int, list[Row]]], count: int
) -> list[tuple[Row, Row, float, float]]:
    changes = []
    for by_step in by_prompt:
        early, late = by_step[min(by_step)], by_step[max(by_step)]
        before, after = (fmean(map(_finite_reward, group)) for group in (early, late))
        if before != after:
            typical = _typical(early, before, after), _typical(late, after, before)
            changes.append((*typical, before, after))
    return sorted(changes, key=lambda change: -abs(change[3] - change[2]))[:count]


def _typical(group: list[Row], mean: float, other: float) -> Row:
    """Return the row nearest to its group's mean; of two as near, the one farther from the other group's mean."""
    farthest_first = sorted(group, key=_finite_reward, reverse=mean > other)
    return min(farthest_first, key=lambda row: abs(_finite_reward(row) - mean))


def _order(row: Row) -> float:
    return -math.inf if math.isnan(row["reward"]) else row["reward"]


def _finite_reward(row: Row) -> float:
    return row["reward"] if math.isfinite(row["reward"]) else 0.0


def _row(written: Row) -> Row:
    row = _ABSENT | written
    row["reward"], row["advantage"] = float(row["reward"]), float(row["advantage"])
    row["reward_parts"] = numbers(row["reward_parts"])
    for name in ("prompt", "completion", "answer"):
        row[name] = row[name] and _shortened(row[name])
    return row


def _shortened(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
