"""Ownership of a run's directory and of its mirror: both belong to this run, or are refused unchanged.

environment.json names the owner on either side: `run` is the run's id for life, `start` the id of one start.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.destinations.mirror import ENVIRONMENT, ENVIRONMENT_LIMIT, Mirror
from burnish.checkpoint.destinations.remote_steps import RemotePath
from burnish.checkpoint.destinations.uploader import SyncProgress
from burnish.checkpoint.resume import Resumed
from burnish.checkpoint.retention import PINS, PINS_LIMIT, Retention
from burnish.checkpoint.steps import step_name, step_paths
from burnish.config.load import dump_yaml, load_config
from burnish.config.resume import require_may_resume, require_same_run
from burnish.config.schema import CheckpointConfig, RunConfig
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.durable import naming_failures
from burnish.files.remote import Remote
from burnish.files.storage import LocalStorage
from burnish.tracking.atomic import write_atomically
from burnish.tracking.progress import Bar
from burnish.tracking.rundir import CHECKPOINTS, RunDirectory

RUN, START, TRAINER = "run", "start", "trainer"
"""Keys of environment.json: the run, this start of it, and the command that it belongs to."""

_CONFIG, _METRICS = "config.yaml", "metrics.jsonl"
_CONFIG_LIMIT, _METRICS_LIMIT = 16 << 20, 4 << 30


def mirror_of(
    url: str | None, settings: CheckpointConfig, directory: Path, layout: Layout
) -> Mirror | None:
    """Return the mirror at a URL. Raises if the URL is wrong or its client is not installed. Collective."""
    if url is None:
        return None
    with agree(layout):
        remote = Remote(url)
        remote.connect(write=True)
    start = gather_objects(_new_id(), layout)[0]
    return Mirror(directory, remote, Retention.of_mirror(settings), start)


def require_own_directory(directory: RunDirectory, config: RunConfig, trainer: str) -> None:
    """Refuse the directory of another command or configuration, or one with steps if `resume` is never.

    A start that failed before it did anything leaves a directory that another configuration may take.
    """
    steps = [path.name for path in step_paths(directory.checkpoints, LocalStorage()).values()]
    if steps or directory.begun:
        found = directory.read_environment().get(TRAINER, trainer)
        _require_trainer(directory.root, found, trainer)
        if directory.config.exists():
            require_same_run(directory.root, load_config(directory.config).config, config)
    require_may_resume(directory.root, steps, config)


def claim(
    directory: RunDirectory,
    mirror: Mirror | None,
    config: RunConfig,
    environment: Mapping[str, Any],
) -> None:
    """Make the directory, whose lease this process holds, and its mirror this run's. Call it on rank 0.

    Writes to the mirror before anything expensive begins. Raises `IncompatibleError` for another run's mirror, and `UsageError`
    if it holds steps and `resume` is never. Both stay unchanged.
    """
    identity = {RUN: directory.read_environment().get(RUN) or _new_id()}
    if mirror is not None:
        theirs = _require_own_mirror(mirror, directory, config, environment[TRAINER])
        identity = {RUN: theirs or identity[RUN], START: mirror.start}
    directory.create()
    directory.write_config(dump_yaml(config))
    directory.write_environment({**identity, **environment})
    if mirror is not None:
        mirror.remote.put(_CONFIG, directory.config.read_bytes())
        mirror.remote.put(ENVIRONMENT, directory.environment.read_bytes())


def _require_own_mirror(
    mirror: Mirror, directory: RunDirectory, config: RunConfig, trainer: str
) -> str | None:
    """Return the id of the run that owns a mirror, which must be this one or have no directory here; None for an empty mirror."""
    steps = mirror.steps()
    names = [path.name for path in step_paths(steps.root, steps).values()]
    theirs = _identity(mirror.remote)
    if theirs is None:
        if names:
            raise IncompatibleError(
                f"{mirror.remote} holds checkpoints, and does not say of which run",
                have=f"{names[-1]} and no {ENVIRONMENT}",
                want="an empty directory, or the mirror of this run",
                do="give this run a name of its own with name=NAME, or another mirror",
            )
        return None
    mine = directory.read_environment().get(RUN)
    if names or theirs.get(RUN) != mine:
        _require_same(mirror.remote, theirs, config, trainer)
    if directory.config.exists() and theirs.get(RUN) != mine:
        raise IncompatibleError(
            f"{mirror.remote} is the mirror of another run than {directory.root} is",
            have=f"run {theirs.get(RUN)}",
            want=f"run {mine or 'without a mirror'}",
            do=f"set name=NAME to mirror this run beside it, or move {directory.root} away to continue that one",
        )
    require_may_resume(RemotePath.of(mirror.remote.url), names, config)
    return str(theirs.get(RUN))


def _new_id() -> str:
    """Names a run, or a start of one."""
    return uuid.uuid4().hex


def bring_back(
    mirror: Mirror | None, directory: RunDirectory, resumed: Resumed | None, layout: Layout
) -> None:
    """After resuming from the mirror, fetch metrics and pins that are not here. Collective."""
    if mirror is None or resumed is None or not isinstance(resumed.step.path, RemotePath):
        return
    with agree(layout), naming_failures(f"{directory.root} cannot be written"):
        if layout.is_main:
            _copy_back(mirror, directory)


def _copy_back(mirror: Mirror, directory: RunDirectory) -> None:
    for name, limit in ((_METRICS, _METRICS_LIMIT), (f"{CHECKPOINTS}/{PINS}", PINS_LIMIT)):
        path = directory.root / name
        if name != _METRICS and path.exists():
            continue
        try:
            write_atomically(path, mirror.remote.read(name, limit))
        except MissingError:
            continue


def step_place(step: int, directory: RunDirectory, mirror: Mirror | None) -> PurePath:
    """Return the directory of a committed step, here or on the mirror."""
    path = directory.checkpoints / step_name(step)
    return path if mirror is None or path.is_dir() else mirror.steps().root / step_name(step)


def behind(
    mirror: Mirror | None, directory: RunDirectory, why: BurnishError, *, meets: bool
) -> BurnishError:
    """Return the error of a finished run whose mirror lacks some of it."""
    again = f"keep {directory.root}; the same command again copies the rest"
    return BurnishError(
        f"the run is done, but {mirror and mirror.remote} has not all of it",
        have=why,
        do="start the same command again: it continues from the newest step there"
        if meets
        else again,
    )


def percent_on(bar: Bar) -> Callable[[SyncProgress], None]:
    """Draw a sync on a bar of a hundred; a sync that begins again does not move it back."""
    shown = 0.0

    def show(progress: SyncProgress) -> None:
        nonlocal shown
        percent = 100 * progress.done / (progress.total or 1)
        bar.advance(max(0.0, percent - shown))
        shown = max(shown, percent)

    return show


def _identity(remote: Remote) -> dict[str, Any] | None:
    """What a mirror says of its run; None where it says nothing."""
    try:
        found = json.loads(remote.read(ENVIRONMENT, ENVIRONMENT_LIMIT))
    except MissingError:
        return None
    except ValueError as error:
        raise _unreadable(remote, error) from error
    if not isinstance(found, dict):
        raise _unreadable(remote, f"a {type(found).__name__}")
    return found


def _unreadable(remote: Remote, have: object) -> CorruptError:
    return CorruptError(
        f"{remote}/{ENVIRONMENT} does not say whose mirror this is",
        have=have,
        want=f'a JSON object with "{RUN}", "{START}" and "{TRAINER}"',
        do="put that of the run's directory there, or give this run a mirror of its own",
    )


def _require_same(remote: Remote, theirs: dict[str, Any], config: RunConfig, trainer: str) -> None:
    """Refuse the mirror of another command or configuration."""
    _require_trainer(remote, theirs.get(TRAINER), trainer)
    with tempfile.TemporaryDirectory() as name:
        recorded = Path(name) / _CONFIG
        recorded.write_bytes(remote.read(_CONFIG, _CONFIG_LIMIT))
        require_same_run(RemotePath.of(remote.url), load_config(recorded).config, config)


def _require_trainer(place: object, found: object, wanted: str) -> None:
    if found != wanted:
        raise IncompatibleError(
            f"{place} holds a run of another kind",
            have=f"burnish {found}",
            want=f"burnish {wanted}",
            do="set name=NAME to begin another run",
        )
