"""`burnish runs`: list the runs of a directory, or compare two. Loads no torch."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from burnish.checkpoint.steps import step_name
from burnish.cli.output import print_text
from burnish.errors import BurnishError, MissingError, UsageError, table
from burnish.runs.ending import first_line
from burnish.runs.run_directory import committed_steps
from burnish.tracking.console import duration
from burnish.tracking.curves import Curves
from burnish.tracking.rundir import RunDirectory
from burnish.view.runs import (
    BEST,
    best_validation,
    describe,
    find_runs,
    last_of,
    main_score,
    parent_of,
    settings_of,
    side_by_side,
)

_SHOWN = ("reward/mean", "train/loss", *BEST)
_LONGEST_REASON = 100
_WIDTH = 32
_BARS = "▁▂▃▄▅▆▇█"

Rows = list[dict[str, Any]]


def runs(args: Namespace) -> None:
    """Print the runs in a directory, newest last; with `compare A B` the settings and curves of two."""
    command, *names = args.runs or ["runs"]
    if command == "compare" and len(names) == 2:
        tables = {"settings": _settings(names), "curves": _curves(names)}
    elif not names and (command != "compare" or Path(command).exists()):
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
    for name, rows in tables.items():
        shown = [*map(_summary, rows)] if name == "runs" else rows
        heads = dict.fromkeys(n for row in shown for n in row if row[n] is not None)
        body = ([_cell(row.get(name)) for name in heads] for row in shown)
        for line in table([[*heads], *body]) if shown else ():
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
    known = {*directories}
    parents = {path: parent_of(path, known) for path in directories}
    # Evaluations stand below their run.
    ordered = [
        each
        for path in directories
        if parents[path] is None
        for each in (path, *(other for other in directories if parents[other] == path))
    ]
    return [_described(RunDirectory(path), parents[path]) for path in ordered]


def _described(run: RunDirectory, parent: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {"run": str(run.root), "directory": str(run.root.absolute())}
    row["parent"] = None if parent is None else str(parent)
    try:
        curves = Curves(run.metrics).refresh()
        return row | _facts(run, curves, describe(run, curves), parent is not None)
    except BurnishError as error:
        problem = error.parts()
    except OSError as error:
        problem = {"problem": f"{error.filename} cannot be read: {error.strerror}"}
    except Exception as error:  # noqa: BLE001 - one run does not hide the others
        problem = {"problem": f"it cannot be read: {type(error).__name__}: {error}"}
    return row | {"state": "unreadable", "reason": problem}


def _facts(
    run: RunDirectory, curves: Curves, facts: Mapping[str, Any], is_evaluation: bool
) -> dict[str, Any]:
    names = ("state", "reason", "model", "step", "of", "started", "ended")
    last = {name: found for name in _SHOWN if (found := last_of(curves, name))}
    best = best_validation(curves)
    score = main_score(curves) if is_evaluation else None
    steps = {path.name: str(path / "model") for path in committed_steps(run.root)}
    updated = datetime.fromtimestamp(facts["updated"], UTC).isoformat(timespec="seconds")
    return {
        **{name: facts[name] for name in names},
        "method": facts["kind"],
        "updated": updated,
        "last": last,
        "best": best,
        "score": score and {"name": score[0], "value": score[1]},
        "last_model": [*steps.values()][-1] if steps else None,
        "best_model": best and steps.get(step_name(best["step"])),
    }


def _summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the list shows of a run."""
    reason = row["reason"] and first_line(row["reason"])[:_LONGEST_REASON]
    name = row["run"]
    if row["state"] == "unreadable":
        return {"run": name, "state": row["state"], "reason": reason}
    if row["state"] == "silent":
        reason = f"last written {_ago(row['ended'])}"
    score = row["score"] if row["parent"] or not row["best"] else None
    best = row["best"]
    last = next(iter(row["last"].items()), None)
    return {
        "run": f"  {name}" if row["parent"] else name,
        "state": row["state"],
        "steps": None if row["parent"] else f"{row['step']}/{row['of'] or '?'}",
        "started": _ago(row["started"]),
        "last": None if row["parent"] or last is None else _number(last[0], last[1]),
        "best": _number(score["name"], score)
        if score
        else best and f"{_number(best['name'], best)} at {best['step']}",
        "reason": reason,
    }


def _number(name: str, value: Mapping[str, Any]) -> str:
    return f"{name} {_cell(value['value'])}"


def _ago(started: Any) -> str | None:
    with suppress(TypeError, ValueError):
        age = datetime.now(UTC) - datetime.fromisoformat(started).astimezone(UTC)
        return f"{duration(max(0.0, age.total_seconds()))} ago"
    return None


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
