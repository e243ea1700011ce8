"""Pin what a run's settings leave open, for all its starts: newest steps of other runs, commits of the hub, what is auto.

config.yaml records them. Loads no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.checkpoint.steps import step_number
from burnish.config.document import recorded
from burnish.config.schema import FORMER_ALPHA, FORMER_LR, RunConfig
from burnish.errors import MissingError, of_setting
from burnish.files.hub import HubPlace, Kind
from burnish.tracking.rundir import CHECKPOINTS, LATEST, RunDirectory

if TYPE_CHECKING:
    from burnish.config.frozen_models import FrozenModel

FrozenOf = Callable[[RunConfig], Iterable["FrozenModel"]]
"""What `Method.frozen` is."""
_CONFIG_LIMIT = 16 << 20

_log = logging.getLogger("burnish")


def at_newest_steps(
    values: Mapping[str, Any], run_dir: Path | None = None, frozen: FrozenOf | None = None
) -> RunConfig:
    """Return the configuration of `values`, where a step's model replaces each run's directory, `latest` or step.

    The run in `run_dir` keeps its steps. Raises `MissingError` for a run without steps. Changes `values`.
    """
    runs = [
        (number, section, key, root)
        for number, (section, key, kind, _) in enumerate(hub_entries(values, frozen))
        if kind == "model" and section[key] and (root := _steps_root(section[key]))
    ]
    began: dict[int, str] = {}
    if runs and run_dir and RunDirectory(run_dir).config.is_file():
        entries = hub_entries(recorded(RunDirectory(run_dir).config).model_dump(), frozen)
        began = {number: str(section[key]) for number, (section, key, *_) in enumerate(entries)}
    for number, section, key, root in runs:
        before = began.get(number, "")
        if before.startswith(f"{root}/") and Path(before).is_dir():
            section[key] = before
            continue
        step = root
        if root.name == CHECKPOINTS:
            from burnish.checkpoint.tools.listing import newest_step

            step = Path(newest_step(root).path)
        own = step / "critic" / "model"
        is_critic = section is values["critic"] and own.is_dir()
        section[key] = str(own if is_critic else step / "model")
    return RunConfig.model_validate(values)


def _steps_root(given: str) -> Path | None:
    """Return the directory of steps, or the step, that a setting names."""
    path = Path(given).expanduser()
    path = path.parent if path.name == LATEST else path
    path = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    is_one = path.name == CHECKPOINTS or step_number(path.name) is not None
    return path if is_one and path.is_dir() else None


def beginning(
    values: Mapping[str, Any],
    run_dir: Path,
    mirror: str | None = None,
    frozen: FrozenOf | None = None,
) -> Mapping[str, Any] | None:
    """Return the values that a run began with, here or on its `mirror`, if `values` leave something open."""
    is_open = any(section[key] == "auto" for section, key, _ in _autos(values))
    if not (is_open or any(_unpinned(values, frozen))) or values["resume"] == "fresh":
        return None
    path = RunDirectory(run_dir).config
    if path.is_file():
        return recorded(path).model_dump()
    if mirror is None:
        return None
    from burnish.checkpoint.destinations.remote_steps import RemotePath
    from burnish.files.remote import Remote
    from burnish.files.urls import Url

    try:
        content = Remote(mirror).read(path.name, _CONFIG_LIMIT)
    except MissingError:
        return None
    return recorded(RemotePath.of(Url.parse(mirror)) / path.name, content).model_dump()


def pin(
    values: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    frozen: FrozenOf | None = None,
    *,
    ask: bool = True,
) -> None:
    """Pin ids of the hub to their commits in `before`, else to the newest. Take what is auto from `before`.

    Without `ask`, ids that `before` lacks stay as they are.
    """
    began = {} if before is None else _commits(before, frozen)
    take_auto(values, values if before is None else before)
    for section, key, place, setting in list(_unpinned(values, frozen)):
        if commit := began.get((_name(setting), place.repo)):
            _log.info("%s stays at commit %s, with which the run began", place, commit)
            section[key] = str(replace(place, revision=commit))
        elif ask:
            from burnish.files.hub_files import HubFiles

            with of_setting(setting):
                pinned = HubFiles.of(place).place
            _log.info("%s is at commit %s", place, pinned.commit)
            section[key] = str(pinned)


def take_auto(values: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Take what is auto in `values` from those that a run began with, which have what auto was then."""
    for (section, key, former), (had, *_) in zip(_autos(values), _autos(before), strict=True):
        # Another learning rate than the former default was chosen, and only who chose it again goes on with it.
        if section[key] == "auto" and former in (None, had[key]):
            section[key] = had[key]


def _autos(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, float | None]]:
    """Yield each setting that may be auto, its section and key, and the default that earlier versions recorded."""
    yield values["engine"], "precision", None
    yield values["optim"], "lr", FORMER_LR
    yield values["model"]["lora"], "alpha", FORMER_ALPHA


def _unpinned(
    values: Mapping[str, Any], frozen: FrozenOf | None
) -> Iterator[tuple[Any, Any, HubPlace, str]]:
    for section, key, kind, setting in hub_entries(values, frozen):
        if (place := HubPlace.of(section[key], kind)) and not place.commit:
            yield section, key, place, setting


def hub_entries(
    values: Mapping[str, Any], frozen: FrozenOf | None = None
) -> Iterator[tuple[Any, Any, Kind, str]]:
    """Yield each setting that may name a place of the hub: its holder, key, kind and name. `frozen` is `Method.frozen`; by default all that sections name."""
    model = values["model"]
    data = values["data"]
    yield model, "path", "model", "model.path"
    yield model, "tokenizer", "model", "model.tokenizer"
    yield model["lora"], "path", "model", "model.lora.path"
    if frozen is None:
        from burnish.config.frozen_models import of_sections

        frozen = of_sections
    for beside in frozen(RunConfig.model_validate(values)):
        holder, key = beside.holder(values)
        if key in holder:  # an earlier version of the method may not have had it
            yield holder, key, "model", beside.setting
    for name in ("train", "validation"):
        for index in range(len(data[name])):
            yield data[name], index, "dataset", f"data.{name}"


def _name(setting: str) -> str:
    """Return a setting without its place in a list, which may change between two starts."""
    return setting.partition("[")[0]


def _commits(before: Mapping[str, Any], frozen: FrozenOf | None) -> dict[tuple[str, str], str]:
    commits_of: dict[tuple[str, str], set[str]] = {}
    for section, key, kind, setting in hub_entries(before, frozen):
        place = HubPlace.of(section[key], kind)
        if place is not None and place.commit:
            commits_of.setdefault((_name(setting), place.repo), set()).add(place.commit)
    return {entry: commits.pop() for entry, commits in commits_of.items() if len(commits) == 1}
