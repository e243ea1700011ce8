"""Let a run's directory stand for its newest step wherever a setting names a model. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.checkpoint.steps import newest, step_number
from burnish.config.document import recorded
from burnish.config.schema import RunConfig
from burnish.errors import MissingError
from burnish.files.hub import HubPlace
from burnish.tracking.rundir import CHECKPOINTS, LATEST, RunDirectory
from burnish.train.commits import hub_entries


def at_newest_steps(values: Mapping[str, Any], run_dir: Path | None = None) -> RunConfig:
    """Return the configuration of `values` with a step's model for each run's directory, `latest` or step.

    The run in `run_dir` keeps its steps. Raises `MissingError` for a run without one. Changes `values`.
    """
    runs = [
        (number, section, key, root)
        for number, (section, key, kind, _) in enumerate(hub_entries(values))
        if kind == "model" and section[key] and (root := _steps_root(section[key]))
    ]
    began: dict[int, str] = {}
    if runs and run_dir and RunDirectory(run_dir).config.is_file():
        entries = hub_entries(recorded(RunDirectory(run_dir).config).model_dump())
        began = {number: str(section[key]) for number, (section, key, *_) in enumerate(entries)}
    for number, section, key, root in runs:
        before = began.get(number, "")
        if before.startswith(f"{root}/") and Path(before).is_dir():
            section[key] = before
            continue
        step = _newest(root) if root.name == CHECKPOINTS else root
        own = step / "critic" / "model"
        is_critic = section is values["critic"] and own.is_dir()
        section[key] = str(own if is_critic else step / "model")
    return RunConfig.model_validate(values)


def is_model(place: str) -> bool:
    """Return whether a place is a model to evaluate, not a run: a Hugging Face directory, a step, or an id of the hub."""
    path = Path(place).expanduser()
    path = path.parent if path.name == LATEST else path
    if not path.is_dir():
        is_run = path.parent.is_dir() or path.parent == Path(RunConfig().output_dir)
        return HubPlace.of(place, "model") is not None and not is_run
    is_steps = path.name == CHECKPOINTS or step_number(path.name) is not None
    is_run = RunDirectory(path).config.is_file()
    return not is_run and (is_steps or (path / "config.json").is_file())


def _steps_root(given: str) -> Path | None:
    """Return the directory of steps, or the step, that a setting names."""
    path = Path(given).expanduser()
    path = path.parent if path.name == LATEST else path
    path = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    is_one = path.name == CHECKPOINTS or step_number(path.name) is not None
    return path if is_one and path.is_dir() else None


def _newest(root: Path) -> Path:
    found = newest(root)
    if found is None:
        raise MissingError(
            f"{root.parent} has no committed step",
            want="a run that has saved",
            do="wait for its first save, or name another model",
        )
    return Path(found.path)
