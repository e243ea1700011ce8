"""Find runs, and describe them for the page and for `burnish runs`. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from burnish.config.credentials import without_credentials
from burnish.config.document import CoreLoader, dotted, recorded
from burnish.errors import CorruptError
from burnish.files.lease import LEASE, is_held
from burnish.runs.run_directory import recorded_config
from burnish.tracking.curves import Curves
from burnish.tracking.report import config_text, model_of
from burnish.tracking.rundir import CHECKPOINTS, STATE, STEPS, TRAINER, RunDirectory

_HEAVY = {CHECKPOINTS, "rollouts", "tensorboard", "logs"}  # a run's directories without other runs


def find_runs(root: Path) -> list[Path]:
    """Return the directories of runs at and below `root`, by the time of their last start, and those that cannot be listed."""
    dated: list[tuple[float, Path]] = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError) and Path(error.filename) != root:
            dated.append((0.0, Path(error.filename)))

    for place, directories, files in os.walk(root, onerror=note):
        directories[:] = [name for name in directories if not name.startswith(".")]
        if "environment.json" in files:
            directories[:] = [name for name in directories if name not in _HEAVY]
            path = Path(place)
            dated.append((_changed(path / "environment.json"), path))
    return [path for _, path in sorted(dated)]


def describe(run: RunDirectory, curves: Curves, *, is_copy: bool = False) -> dict[str, Any]:
    """Describe a run, whose metrics are `curves`. A copy cannot show whether the run is running. Raises `CorruptError`."""
    status = run.read_status()
    environment = run.read_environment()
    if curves.problem is not None:
        raise curves.problem
    state = status.get(STATE, "ended")
    if not is_copy and is_held(run.checkpoints / LEASE):
        state = "running"
    elif not is_copy and state == "running":  # it was killed
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
