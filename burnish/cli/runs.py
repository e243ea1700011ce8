"""`burnish runs`: list the runs of a directory, or compare two. Loads no torch."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.cli.output import print_text
from burnish.errors import BurnishError, MissingError, UsageError, table
from burnish.tracking.console import duration
from burnish.tracking.curves import Curves
from burnish.tracking.rundir import RunDirectory
from burnish.view.runs import describe, find_runs, settings_of, side_by_side

_BEST = {"val/reward": max, "val/loss": min}
_SHOWN = ("reward/mean", "train/loss", *_BEST)
_WIDTH = 32
_BARS = "▁▂▃▄▅▆▇█"

Rows = list[dict[str, Any]]


def runs(args: Namespace) -> None:
    """Print the runs in a directory, newest last; with `compare A B` the settings and curves of two."""
    command, *names = args.runs or ["runs"]
    if command == "compare" and len(names) == 2:
        tables = {"settings": _settings(names), "curves": _curves(names)}
    elif not names:
        tables = {"runs": _listed(Path(command))}
    else:
        raise UsageError(
            "runs takes one directory, or compare A B",
            have=" ".join(args.runs),
            do="see burnish runs --help",
        )
    if args.json:
        print_text(json.dumps(tables))
        return
    for rows in filter(None, tables.values()):
        heads = [n for n in max(rows, key=len) if any(r.get(n) is not None for r in rows)]
        for line in table([heads, *([_cell(row.get(name)) for name in heads] for row in rows)]):
            print_text(line)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _listed(root: Path) -> Rows:
    directories = find_runs(root)
    if not directories:
        raise MissingError(
            f"there are no runs in {root}",
            want="a directory of runs",
            do="give the directory that has them",
        )
    return [_described(RunDirectory(path)) for path in directories]


def _described(run: RunDirectory) -> dict[str, Any]:
    try:
        curves = Curves(run.metrics).refresh()
        return _row(run, curves, describe(run, curves))
    except BurnishError as error:
        return {"run": str(run.root), "state": error.problem}
    except OSError as error:
        state = f"{error.filename} cannot be read: {error.strerror}"
        return {"run": str(run.root), "state": state}
    except Exception as error:  # noqa: BLE001 - one run does not hide the others
        return {"run": str(run.root), "state": f"it cannot be read: {error}"}


def _row(run: RunDirectory, curves: Curves, facts: Mapping[str, Any]) -> dict[str, Any]:
    age = duration(max(0.0, time.time() - run.environment.stat().st_mtime))
    curves_by_name = {name: curves.finite(name) for name in _SHOWN}
    shown = {n: _BEST[n](v) if n in _BEST else v[-1] for n, v in curves_by_name.items() if v}
    place = {"run": str(run.root), **{name: facts[name] for name in ("state", "step", "of")}}
    return place | {"started": age} | {name: shown.get(name) for name in _SHOWN}


def _settings(names: Sequence[str]) -> Rows:
    both = side_by_side([settings_of(Path(name)) for name in names])
    return [
        {"setting": key, **dict(zip(names, map(json.dumps, values), strict=True))}
        for key, values in both.items()
        if values[0] != values[1]
    ]


def _curves(names: Sequence[str]) -> Rows:
    logged = {name: Curves(RunDirectory(Path(name)).metrics).whole() for name in names}
    rows: Rows = []
    for metric in (*_SHOWN, "actor/entropy", "response_length/mean"):
        values = {
            run: series for run, curves in logged.items() if (series := curves.finite(metric))
        }
        every = [value for series in values.values() for value in series]
        for run, series in values.items():
            ends = {"last": series[-1], "min": min(series), "max": max(series)}
            curve = _sparkline(series, min(every), max(every))
            rows.append({"metric": metric, "run": run, "curve": curve, **ends})
    return rows


def _sparkline(values: Sequence[float], low: float, high: float) -> str:
    n = len(values)
    count = min(_WIDTH, len(values))
    shares = [values[i * n // count : (i + 1) * n // count] for i in range(count)]
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((sum(each) / len(each) - low) * scale)] for each in shares)
