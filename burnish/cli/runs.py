"""`burnish runs`: list the runs of a directory, and show two beside each other. Loads no torch."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.cli.output import print_text
from burnish.config.document import recorded
from burnish.errors import BurnishError, MissingError, UsageError, table
from burnish.files.lease import LEASE, is_held
from burnish.tracking.console import duration
from burnish.tracking.rundir import STATE, STEPS, RunDirectory
from burnish.tracking.trackers import read_metrics
from burnish.train.own_directory import recorded_config

_BEST = {"val/reward": max, "val/loss": min}
_SHOWN = ("reward/mean", "train/loss", *_BEST)
_WIDTH, _BARS = 32, "▁▂▃▄▅▆▇█"

Rows = list[dict[str, Any]]


def runs(given: Namespace) -> None:
    """Print the runs in a directory, newest last; with `compare A B` the settings and curves that two have."""
    command, *names = given.given or ["runs"]
    if command == "compare" and len(names) == 2:
        tables = {"settings": _settings(*names), "curves": _curves(names)}
    elif not names:
        tables = {"runs": _listed(Path(command))}
    else:
        raise UsageError("runs takes one directory, or compare A B", have=" ".join(given.given))
    if given.json:
        print_text(json.dumps(tables))
        return
    for rows in tables.values():
        heads = [
            n for n in max(rows, key=len, default={}) if any(r.get(n) is not None for r in rows)
        ]
        for line in table([heads, *([_cell(row.get(name)) for name in heads] for row in rows)]):
            print_text(line)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _listed(root: Path) -> Rows:
    found = sorted(root.glob("**/environment.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MissingError(f"there are no runs in {root}", want="a directory of runs", do="give it")
    return [_described(RunDirectory(path.parent)) for path in found]


def _described(run: RunDirectory) -> dict[str, Any]:
    try:
        rows, status = read_metrics(run.metrics), run.read_status()
        total = status.get(STEPS) or recorded(run.config).steps
    except BurnishError as error:
        return {"run": str(run.root), "state": error.problem}
    step = int(rows[-1]["step"]) if rows else 0
    state = status.get(STATE, "ended")
    if state == "running":  # and was killed, if nobody holds the lease
        state = "ended"
    if is_held(run.checkpoints / LEASE):
        state = "running"
    values = {name: _finite(rows, name) for name in _SHOWN}
    told = {n: _BEST[n](v) if n in _BEST else v[-1] for n, v in values.items() if v}
    age = duration(max(0.0, time.time() - run.environment.stat().st_mtime))
    place = {"run": str(run.root), "state": state, "step": step, "of": total, "started": age}
    return place | {name: told.get(name) for name in _SHOWN}


def _settings(*names: str) -> Rows:
    """Return the settings in which two runs differ."""
    both = [dict(_flat(recorded(recorded_config(Path(n))).model_dump(mode="json"))) for n in names]
    rows = [[key, *(json.dumps(each.get(key)) for each in both)] for key in both[0] | both[1]]
    heads = ("setting", *names)
    return [dict(zip(heads, row, strict=True)) for row in rows if row[1] != row[2]]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key[1:], value
        return
    for name, each in value.items():
        yield from _flat(each, f"{key}.{name}")


def _finite(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _curves(names: Sequence[str]) -> Rows:
    logged = {name: read_metrics(RunDirectory(Path(name)).metrics) for name in names}
    found: Rows = []
    for metric in (*_SHOWN, "actor/entropy", "response_length/mean"):
        values = {run: _finite(rows, metric) for run, rows in logged.items()}
        every = [value for each in values.values() for value in each]
        for run, each in values.items():
            if each:
                ends = {"last": each[-1], "min": min(each), "max": max(each)}
                curve = _sparkline(each, min(every), max(every))
                found.append({"metric": metric, "run": run, "curve": curve, **ends})
    return found


def _sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return at most `_WIDTH` bars, each the mean of its share of the values."""
    n, count = len(values), min(_WIDTH, len(values))
    shares = [values[i * n // count : (i + 1) * n // count] for i in range(count)]
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((sum(each) / len(each) - low) * scale)] for each in shares)
