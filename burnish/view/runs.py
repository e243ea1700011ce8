"""Find runs, and describe them for the page and for `burnish runs`. Loads no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import yaml

from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.retention import read_pins
from burnish.checkpoint.steps import open_step, step_paths
from burnish.config.document import CoreLoader, recorded
from burnish.errors import BurnishError, CorruptError, count_text
from burnish.files.lease import LEASE, is_held
from burnish.files.storage import Source
from burnish.tracking.rundir import CHECKPOINTS, STATE, STEPS, TRAINER, RunDirectory, dotted
from burnish.train.own_directory import recorded_config
from burnish.view.curves import Curves

_HEAVY = {CHECKPOINTS, "rollouts", "tensorboard", "logs"}
# Directories of a run that hold no other run.
_MODEL = re.compile(r"^model:\n(?:  .*\n)*?  path: (.*)$", re.M)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """How a run is."""

    state: str = "ended"
    """running, finished, stopped, failed, or ended without saying how."""
    step: int = 0
    of: int | None = None
    kind: str | None = None
    started: str | None = None
    updated: float = 0.0
    model: str | None = None
    values: Mapping[str, list[float]] = field(default_factory=dict)
    """The finite values of metrics."""
    error: BurnishError | None = None
    """Why little is known."""


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


def describe(
    run: RunDirectory, curves: Curves, names: Sequence[str], *, is_copy: bool = False
) -> RunFacts:
    """Return how a run is, with the values of the metrics `names`. `curves` are refreshed before.

    A copy does not tell whether a process still runs.
    """
    updated = max((_changed(path) for path in (run.metrics, run.environment)), default=0.0)
    try:
        status, environment = run.read_status(), run.read_environment()
        if curves.problem is not None:
            raise curves.problem
        total = status.get(STEPS) or recorded(run.config).steps
    except BurnishError as error:
        return RunFacts(updated=updated, error=error)
    state = status.get(STATE, "ended")
    if state == "running" and not is_copy:  # and was killed, if nobody holds the lease
        state = "ended"
    if not is_copy and is_held(run.checkpoints / LEASE):
        state = "running"
    model = _MODEL.search(run.config.read_text(errors="replace")) if run.config.exists() else None
    curve = {name: curves.by_name.get(name) for name in names}
    return RunFacts(
        state,
        curves.last_step,
        total,
        environment.get(TRAINER),
        environment.get("started"),
        updated,
        model[1].strip("\"'") if model and model[1] != "null" else None,
        {name: each.finite() for name, each in curve.items() if each is not None},
    )


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def settings_of(run: Path) -> dict[str, Any]:
    """Return a run's settings by name, also of another version's. Raises `MissingError`, and `CorruptError` for no YAML."""
    path = recorded_config(run)
    try:
        return dict(dotted(recorded(path).model_dump(mode="json")))
    except CorruptError:
        try:
            return dict(dotted(yaml.load(path.read_text(), CoreLoader)))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            pass
        raise


def beside(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each setting's values in several runs."""
    names = dict.fromkeys(name for each in settings for name in each)
    return {name: [each.get(name) for each in settings] for name in names}


def list_steps(root: PurePath, source: Source) -> dict[str, Any]:
    """Return the steps of a directory of checkpoints, oldest first, and the newest that can be continued from."""
    pins, problem = {}, None
    try:
        pins = read_pins(root, source)
    except CorruptError as error:
        problem = error.problem
    steps = [_step(n, path, source, pins) for n, path in step_paths(root, source).items()]
    healthy = [each["step"] for each in steps if each["health"] == "committed"]
    return {"steps": steps, "latest": healthy[-1] if healthy else None, "problem": problem}


def _step(number: int, path: PurePath, source: Source, pins: Mapping[int, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"step": number, "pinned": pins.get(number)}
    unknown = dict.fromkeys(("committed", "bytes", "files", "layout"))
    try:
        step = open_step(path, source)
        seconds = (path / COMMIT).stat().st_mtime if isinstance(path, Path) else None
    except (BurnishError, OSError) as error:
        problem = error.problem if isinstance(error, BurnishError) else error
        return {**found, **unknown, "health": f"damaged: {problem}"}
    saved = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return {
        **found,
        "committed": saved and saved.isoformat(timespec="seconds"),
        "bytes": step.manifest.total_bytes,
        "files": len(step.manifest.files),
        "layout": count_text(step.manifest.world, "process"),
        "health": "committed" if step.healthy else "unhealthy",
    }
