"""Settle for the life of a run what settings leave open: commits of the Hugging Face Hub, the precision.

config.yaml records both. Loads no torch.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.config.document import recorded
from burnish.config.schema import RunConfig
from burnish.errors import MissingError, of_setting
from burnish.files.hub import HubPlace, Kind
from burnish.files.remote import Remote
from burnish.tracking.rundir import RunDirectory

_CONFIG_LIMIT = 16 << 20

_log = logging.getLogger("burnish")


def beginning(
    values: Mapping[str, Any], run_dir: Path, mirror: str | None = None
) -> Mapping[str, Any] | None:
    """Return the values that a run began with, here or on its `mirror`, if `values` leave something open."""
    is_open = values["engine"]["precision"] == "auto" or any(_moving(values))
    if not is_open or values["resume"] == "fresh":
        return None
    recorded_values = _recorded(run_dir, mirror)
    return None if recorded_values is None else recorded_values.model_dump()


def pin(values: Mapping[str, Any], before: Mapping[str, Any] | None, *, ask: bool = True) -> None:
    """Put ids of the hub at the commits of the run's `beginning`, else of today. An auto precision becomes that of the beginning.

    Without `ask` other ids stay as they are.
    """
    engine = values["engine"]
    if before is not None and engine["precision"] == "auto":
        engine["precision"] = before["engine"]["precision"]
    began = {} if before is None else _commits(before)
    for section, key, place, setting in list(_moving(values)):
        if commit := began.get((setting, place.repo)):
            _log.info("%s stays at commit %s, with which the run began", place, commit)
            section[key] = str(replace(place, revision=commit))
        elif ask:
            with of_setting(setting):
                found = place.at_commit()
            _log.info("%s is at commit %s", place, found.commit)
            section[key] = str(found)


def _moving(values: Mapping[str, Any]) -> Iterator[tuple[Any, Any, HubPlace, str]]:
    for section, key, kind, setting in hub_entries(values):
        if (place := HubPlace.of(section[key], kind)) and not place.commit:
            yield section, key, place, setting


def hub_entries(values: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Kind, str]]:
    """Yield each setting that may name a place of the hub: its holder, key, kind and name."""
    model, data = values["model"], values["data"]
    yield model, "path", "model", "model.path"
    yield model, "tokenizer", "model", "model.tokenizer"
    yield model["lora"], "path", "model", "model.lora.path"
    yield values["critic"], "path", "model", "critic.path"
    for judge in values["reward"]["models"]:
        yield judge, "path", "model", "reward.models"
    for name in ("train", "validation"):
        for index in range(len(data[name])):
            yield data[name], index, "dataset", f"data.{name}"


def _recorded(run_dir: Path, mirror: str | None) -> RunConfig | None:
    path = RunDirectory(run_dir).config
    if path.is_file():
        return recorded(path)
    if mirror is None:
        return None
    try:
        content = Remote(mirror).read(path.name, _CONFIG_LIMIT)
    except MissingError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(content)
        return recorded(copy)


def _commits(before: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], set[str]] = {}
    for section, key, kind, setting in hub_entries(before):
        place = HubPlace.of(section[key], kind)
        if place is not None and place.commit:
            found.setdefault((setting, place.repo), set()).add(place.commit)
    return {entry: commits.pop() for entry, commits in found.items() if len(commits) == 1}
