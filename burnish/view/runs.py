"""Find runs, and describe them for the page and for `burnish runs`. Loads no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import yaml

from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.retention import read_pins
from burnish.checkpoint.steps import open_step, step_paths
from burnish.config.document import CoreLoader, recorded
from burnish.errors import BurnishError, CorruptError, IncompatibleError
from burnish.files.durable import naming_failures
from burnish.files.lease import LEASE, is_held
from burnish.files.storage import Source
from burnish.tracking.rundir import CHECKPOINTS, STATE, STEPS, TRAINER, RunDirectory, dotted
from burnish.train.own_directory import recorded_config
from burnish.view.curves import Curves

_HEAVY = {CHECKPOINTS, "rollouts", "tensorboard", "logs"}  # of a run; they hold no other run
_MODEL = re.compile(r"^model:\n(?:  .*\n)*?  path: (.*)$", re.M)


def find_runs(root: Path) -> list[Path]:
    """Return the directories of runs at and below `root`, by the time of their last start."""
    found: list[tuple[float, Path]] = []
    for place, directories, files in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        if "environment.json" in files:
            directories[:] = [name for name in directories if name not in _HEAVY]
            path = Path(place)
            found.append((_changed(path / "environment.json"), path))
    return [path for _, path in sorted(found)]


def describe(run: RunDirectory, curves: Curves, *, is_copy: bool = False) -> dict[str, Any]:
    """Return how a run is, with the curves of its metrics. A copy does not tell whether it runs. Raises `CorruptError`."""
    status, environment = run.read_status(), run.read_environment()
    if curves.problem is not None:
        raise curves.problem
    state = status.get(STATE, "ended")
    if not is_copy and is_held(run.checkpoints / LEASE):
        state = "running"
    elif not is_copy and state == "running":  # and was killed
        state = "ended"
    return {
        "kind": environment.get(TRAINER),
        "state": state,
        "step": curves.last_step,
        "of": status.get(STEPS) or recorded(run.config).steps,
        "started": environment.get("started"),
        "updated": max(_changed(path) for path in (run.metrics, run.environment)),
        "model": model_of(run),
    }


def model_of(run: RunDirectory) -> str | None:
    """Return what a run's configuration names as its model, also of another version's."""
    found = _MODEL.search(run.config.read_text(errors="replace")) if run.config.exists() else None
    return found[1].strip("\"'") if found and found[1] != "null" else None


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def settings_of(run: Path) -> dict[str, Any]:
    """Return a run's settings by name, also of another version's. Raises `MissingError`, and `CorruptError` for no YAML."""
    path = recorded_config(run)
    try:
        return dict(dotted(recorded(path).model_dump(mode="json")))
    except CorruptError:
        with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
            return dict(dotted(yaml.load(path.read_text(), CoreLoader)))
        raise


def beside(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each setting's values in several runs."""
    names = dict.fromkeys(name for each in settings for name in each)
    return {name: [each.get(name) for each in settings] for name in names}


def list_steps(root: PurePath, source: Source) -> tuple[list[dict[str, Any]], CorruptError | None]:
    """Return the steps of a directory of checkpoints, oldest first, and what is wrong with its pins."""
    pins, problem = {}, None
    try:
        pins = read_pins(root, source)
    except CorruptError as error:
        problem = error
    paths = step_paths(root, source)
    return [_step(path, source, n, pins.get(n)) for n, path in paths.items()], problem


def _step(path: PurePath, source: Source, number: int, reason: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "step": number, "pinned": reason}
    try:
        with naming_failures(f"{path} cannot be read"):
            step, saved = open_step(path, source), saved_at(path)
    except BurnishError as error:
        damaged = not isinstance(error, IncompatibleError)
        return {**found, "damaged": damaged, "problem": error.problem}
    size, files = step.manifest.total_bytes, len(step.manifest.files)
    found |= {"bytes": size, "files": files, "processes": step.manifest.world}
    return {**found, "saved": saved, "healthy": step.healthy}


def saved_at(path: PurePath) -> str:
    """Return when a step was committed; "" on a mirror, which got it later."""
    if not isinstance(path, Path):
        return ""
    seconds = (path / COMMIT).stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
