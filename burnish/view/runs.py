"""Find runs, and describe them for the page and for `burnish runs`. Loads no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from burnish.config.credentials import without_credentials
from burnish.config.document import CoreLoader, dotted, recorded
from burnish.errors import CorruptError
from burnish.runs.ending import ending
from burnish.runs.run_directory import recorded_config
from burnish.tracking.curves import Curves
from burnish.tracking.report import config_text, model_of
from burnish.tracking.rundir import CHECKPOINTS, STATUS, STEPS, TRAINER, RunDirectory

_ORIGIN = ("environment.json", "config.yaml")
_COURSE = ("metrics.jsonl", STATUS)
BEST: Mapping[str, Callable[..., Any]] = {"val/reward": max, "val/loss": min}
"""The numbers of a validation by which runs are compared, and which of their values is best."""
_HEAVY = {CHECKPOINTS, "rollouts", "tensorboard", "logs"}  # a run's directories without other runs


def find_runs(root: Path) -> list[Path]:
    """Return the directories of runs at and below `root`, by the time of their last start, and those that cannot be listed.

    A run has a configuration or an environment, and metrics or a state; another program's copy of its configuration is none.
    """
    dated: list[tuple[float, Path]] = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError) and Path(error.filename) != root:
            dated.append((0.0, Path(error.filename)))

    for place, directories, files in os.walk(root, onerror=note):
        directories[:] = [name for name in directories if not name.startswith(".")]
        if is_run(files):
            directories[:] = [name for name in directories if name not in _HEAVY]
            path = Path(place)
            dated.append((_changed(path / "environment.json"), path))
    return [path for _, path in sorted(dated)]


def is_run(names: Collection[str]) -> bool:
    """Return whether a directory with these files is a run."""
    return any(name in names for name in _ORIGIN) and any(name in names for name in _COURSE)


def is_run_at(path: Path) -> bool:
    """Return whether a directory is a run."""
    files = {name for name in (*_ORIGIN, *_COURSE) if os.path.lexists(path / name)}
    return is_run({name for name in files if not (path / name).is_dir()})


def parent_of(path: Path, runs: Container[Path]) -> Path | None:
    """Return the run that an evaluation measures, one of `runs`."""
    above = path.parent.parent
    return above if path.parent.name == "evaluations" and above in runs else None


def describe(run: RunDirectory, curves: Curves) -> dict[str, Any]:
    """Describe a run, whose metrics are `curves`. Raises `CorruptError`."""
    status = run.read_status()
    environment = run.read_environment()
    if curves.problem is not None:
        raise curves.problem
    state, reason, ended = ending(run)
    return {
        "kind": environment.get(TRAINER),
        "state": state,
        "reason": reason,
        "step": curves.last_step,
        "of": status.get(STEPS) or recorded(run.config).steps,
        "started": environment.get("started"),
        "ended": ended,
        "updated": max(_changed(path) for path in (run.metrics, run.environment)),
        "model": model_of(run),
    }


def best_validation(curves: Curves) -> dict[str, Any] | None:
    """Return name, value and step of the best validation, if there was any."""
    for name, better in BEST.items():
        curve = curves.by_name.get(name)
        values = () if curve is None else curve.values[:]  # another thread may read more meanwhile
        known = [*zip(values, curve.steps if curve else (), strict=False)]
        if finite := [each for each in known if math.isfinite(each[0])]:
            value, step = better(finite, key=itemgetter(0))
            return {"name": name, "value": value, "step": step}
    return None


def last_of(curves: Curves, name: str) -> dict[str, Any] | None:
    """Return the last finite value of a metric and its step."""
    curve = curves.by_name.get(name)
    pairs = () if curve is None else zip(curve.values[:], curve.steps, strict=False)
    known = [each for each in pairs if math.isfinite(each[0])]
    return {"value": known[-1][0], "step": known[-1][1]} if known else None


def main_score(curves: Curves) -> tuple[str, float] | None:
    """Return the main number of an evaluation: the share of right answers, else the mean reward or the loss."""
    for name in (*(each for each in curves.by_name if each.startswith("val/mean@")), *BEST):
        if values := curves.finite(name):
            return name, values[-1]
    return None


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def settings_of(run: Path) -> dict[str, Any]:
    """Return a run's settings by name, without credentials, even if another version wrote them. Raises `MissingError`, and `CorruptError` for invalid YAML."""
    path = recorded_config(run)
    try:
        return dict(dotted(without_credentials(recorded(path).model_dump(mode="json"))))
    except CorruptError:
        with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
            if isinstance(values := yaml.load(config_text(RunDirectory(run)), CoreLoader), dict):
                return dict(dotted(without_credentials(values)))
        raise


def side_by_side(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each setting's values in several runs."""
    names = dict.fromkeys(name for each in settings for name in each)
    return {name: [each.get(name) for each in settings] for name in names}
