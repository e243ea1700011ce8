"""Put ids of the Hugging Face Hub at commits, once for the life of a run.

The run's config.yaml records them, so a branch that moves does not change a run. Loads no torch.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.config.document import recorded
from burnish.errors import MissingError, of_setting
from burnish.files.hub import HubPlace, Kind
from burnish.files.remote import Remote
from burnish.tracking.rundir import RunDirectory

_CONFIG_LIMIT = 16 << 20

_log = logging.getLogger("burnish")


def pin(
    values: Mapping[str, Any], run_dir: Path, mirror: str | None = None, *, ask: bool = True
) -> None:
    """Put ids of the hub in a configuration's values at commits: those that the run began with, else those of today.

    The run is recorded in `run_dir` or on its `mirror`. Without `ask` other ids stay as they are.
    """
    moving = [
        (section, key, place, setting)
        for section, key, kind, setting in hub_entries(values)
        if (place := HubPlace.of(section[key], kind)) and not place.commit
    ]
    goes_on = moving and values["resume"] != "fresh"
    began = _began_with(run_dir, mirror) if goes_on else {}
    for section, key, place, setting in moving:
        if commit := began.get((setting, place.repo)):
            _log.info("%s stays at commit %s, with which the run began", place, commit)
            section[key] = str(replace(place, revision=commit))
        elif ask:
            with of_setting(setting):
                section[key] = str(place.at_commit())


def hub_entries(values: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Kind, str]]:
    """Yield each setting that may name a place of the hub: what holds it, its key there, the kind, its name."""
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


def _began_with(run_dir: Path, mirror: str | None) -> dict[tuple[str, str], str]:
    """Return the commits that a run has recorded, here or on its mirror, by setting and repository."""
    path = RunDirectory(run_dir).config
    if path.is_file():
        before = recorded(path)
    elif mirror is not None:
        try:
            content = Remote(mirror).read(path.name, _CONFIG_LIMIT)
        except MissingError:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, path.name)
            copy.write_bytes(content)
            before = recorded(copy)
    else:
        return {}
    found: dict[tuple[str, str], set[str]] = {}
    for section, key, kind, setting in hub_entries(before.model_dump()):
        place = HubPlace.of(section[key], kind)
        if place is not None and place.commit:
            found.setdefault((setting, place.repo), set()).add(place.commit)
    return {entry: commits.pop() for entry, commits in found.items() if len(commits) == 1}
