"""The directory of a run whose name nobody chose, and a run's configuration for use in any directory. Loads no torch."""

from __future__ import annotations

import logging
import os
import re
from glob import glob
from itertools import count
from pathlib import Path
from typing import Any

from burnish.config.document import recorded
from burnish.config.resume import RunIdentity, settings_difference
from burnish.config.schema import RunConfig
from burnish.distributed.environment import place_of
from burnish.files.hub import HubPlace
from burnish.files.lease import LEASE, is_held
from burnish.files.urls import is_url
from burnish.method import Method
from burnish.runs.hub_revisions import hub_entries, take_auto
from burnish.runs.run_directory import committed_steps, may_make_way, recorded_config
from burnish.tracking.rundir import DIRECTORY, LATEST, TRAINER, RunDirectory

_log = logging.getLogger("burnish")


def placed_config(run_dir: Path) -> RunConfig:
    """Return a run's configuration for use in any directory: its relative paths count from where the run was started."""
    config = recorded(recorded_config(run_dir))
    below = Path(config.output_dir) / (config.name or "")
    root = run_dir.absolute()
    start = RunDirectory(run_dir).read_environment().get(DIRECTORY)
    # The whole project may have moved since.
    if not below.is_absolute() and root.parts[-len(below.parts) :] == below.parts:
        start = root.parents[len(below.parts) - 1]
    if not isinstance(start, str | Path) or Path(start) == Path.cwd():
        return config
    values = config.model_dump()
    entries = [(section, key) for section, key, *_ in hub_entries(values)]
    entries += [(values["model"], "chat_template"), (values["model"], "fresh")]
    for section, key in entries:
        section[key] = _placed(section[key], Path(start))
    return RunConfig.model_validate(_with_placed_code(values, Path(start)))


def _with_placed_code(value: Any, start: Path) -> Any:
    """Return settings in which each file.py:name below `start` is named with its directory."""
    if isinstance(value, dict):
        return {name: _with_placed_code(each, start) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_placed_code(each, start) for each in value]
    is_code = isinstance(value, str) and re.fullmatch(r"[^:]+\.py:\w+", value)
    return _placed(value, start) if is_code else value


def _placed(value: Any, start: Path) -> Any:
    """Return a text that names something below `start` with that directory; anything else as it is."""
    if not isinstance(value, str) or is_url(value) or Path(value).expanduser().is_absolute():
        return value
    file = value.rpartition(":")[0]
    texts = [text for text in (value, file) if text and glob(str(start / text))]
    if not texts:
        return value
    here = Path(texts[0])
    if here.exists() and not here.samefile(start / texts[0]):
        _log.warning(
            "%s is the one in %s, where the run was started, not the one here", here, start
        )
    return str(start / value)


def with_free_name(run: RunIdentity, method: Method) -> RunConfig:
    """Return the configuration of a run whose name nobody chose, under the name of its own directory.

    That is the directory that these settings began. Otherwise it is the first free one of NAME, NAME-2, NAME-3.
    """
    root = run.config.directory
    if run.config.mirror_url is not None or not root.exists():
        return run.config
    numbered = {n: root.with_name(f"{root.name}-{n}") for n in _numbers_beside(root)}
    own = next((n for n in (root, *numbered.values()) if _is_own(n, run, method)), None)
    if own is None and (run.config.resume == "fresh" or _is_free(root, run)):
        own = root
    if own is None:
        others = (root.with_name(f"{root.name}-{n}") for n in count(2))
        own = next(each for each in others if _is_free(each, run))
    if own != root and place_of(os.environ).layout.is_main:
        _log.warning("%s has other settings or data, so this run is %s", root, own)
    return run.config.model_copy(update={"name": own.name})


def _numbers_beside(root: Path) -> list[int]:
    endings = (path.name.removeprefix(f"{root.name}-") for path in root.parent.iterdir())
    return sorted(int(each) for each in endings if each.isdecimal() and len(each) < 10)


def _is_own(root: Path, run: RunIdentity, method: Method) -> bool:
    """Return whether this run began the directory, or nobody's configuration is there."""
    directory = RunDirectory(root)
    if not directory.config.is_file():
        return root.exists() and bool(committed_steps(root))
    trainer = directory.read_environment().get(TRAINER, run.trainer)
    before = RunIdentity(trainer, recorded(directory.config))
    values = run.config.model_dump()
    take_auto(values, before.config.model_dump())
    now = method.with_defaults(RunConfig.model_validate(values))
    if trainer != run.trainer or settings_difference(before.config, now):
        return False
    had = _inputs(before)
    new = _inputs(run)
    return len(had) == len(new) and all(map(_is_same_place, had, new))


def _is_free(root: Path, run: RunIdentity) -> bool:
    """Return whether a run may begin in a directory that it does not own."""
    directory = RunDirectory(root)
    if is_held(directory.checkpoints / LEASE):
        return False
    return not (directory.begun or committed_steps(root)) or may_make_way(directory, run)


def _inputs(run: RunIdentity) -> list[str | None]:
    return [run.config.model.path, *run.config.data.train]


def _is_same_place(before: str | None, now: str | None) -> bool:
    """Return whether two texts name one model or file. What is no longer at its place has moved."""
    if before is None or now is None or before == now:
        return before == now
    had = Path(before).expanduser()
    new = Path(now).expanduser()
    new = new.parent if new.name == LATEST else new
    if new in had.parents or not had.exists():  # a run's newest step of then; or the place is empty
        hubs = [HubPlace.of(each, "dataset") for each in (before, now)]
        repos = {None if hub is None else hub.repo for hub in hubs}
        return None in repos or len(repos) == 1
    if not new.exists():
        return False
    # trainer_state compares the content of files of one size.
    is_one_size = had.is_file() and new.is_file() and had.stat().st_size == new.stat().st_size
    return had.samefile(new) or is_one_size
