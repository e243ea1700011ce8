"""Tell whether a directory is a run's, and whether this run may use it. Loads no torch."""

from __future__ import annotations

import logging
import os
from itertools import count
from pathlib import Path

from burnish.checkpoint.steps import QUARANTINE, step_paths
from burnish.config.document import recorded
from burnish.config.resume import RunIdentity, settings_difference
from burnish.errors import MissingError, UsageError
from burnish.files.lease import LEASE, holding_lease
from burnish.files.storage import LOCAL
from burnish.tracking.rundir import CHECKPOINTS, TRAINER, RunDirectory

_log = logging.getLogger("burnish")


def recorded_config(run_dir: Path) -> Path:
    """Return the configuration in a run's directory. Raises `MissingError`."""
    path = RunDirectory(run_dir).config
    if not path.is_file():
        raise MissingError(
            f"{run_dir} is not a run's directory",
            have=f"a directory without {path.name}",
            want="a directory that burnish sft or rl wrote, that of a model, or a configuration file",
            do="give runs/NAME",
        )
    return path


def require_own_directory(directory: RunDirectory, run: RunIdentity) -> None:
    """Refuse the directory of another command or configuration, or one with steps if `resume` is never.

    Accepts a directory that `make_way` renames, and one whose run never logged a step.
    """
    steps = [path.name for path in committed_steps(directory.root)]
    if (steps or directory.begun) and not may_make_way(directory, run):
        run.require_trainer(directory.root, directory.read_environment().get(TRAINER, run.trainer))
        if directory.config.exists():
            run.require_same(directory.root, recorded(directory.config))
    run.require_may_resume(directory.root, steps)


def make_way(directory: RunDirectory, run: RunIdentity) -> None:
    """Rename a directory in which another configuration has saved nothing, or any one if `resume` is fresh.

    Raises `BurnishError` if a run is using it. Call it in one process, before the run begins.
    """
    if not directory.begun or not may_make_way(directory, run):
        return
    is_its = directory.read_environment().get(TRAINER) == run.trainer and directory.config.exists()
    is_same = is_its and not settings_difference(recorded(directory.config), run.config)
    if is_same and run.config.resume != "fresh":
        return
    with holding_lease(directory.checkpoints / LEASE):
        others = (directory.root.with_name(f"{directory.root.name}.{n}") for n in count(1))
        aside = next(path for path in others if not path.exists())
        directory.root.rename(aside)
    _log.warning("%s is now %s, and the run begins anew", directory.root, aside)


def may_make_way(directory: RunDirectory, run: RunIdentity) -> bool:
    """Return whether the directory may be renamed. Saved steps may be on a mirror, or in quarantine."""
    saved = committed_steps(directory.root) or (directory.checkpoints / QUARANTINE).exists()
    return run.config.mirror_url is None and (run.config.resume == "fresh" or not saved)


def committed_steps(directory: Path) -> list[Path]:
    """Return a run's steps, oldest first. Raises `UsageError` if a file stands in the directory's place."""
    parents = (directory, *directory.parents)
    file = next((each for each in parents if os.path.lexists(each) and not each.is_dir()), None)
    have = None if file is None else f"{file}, which is no directory"
    try:
        if have is None:
            return list(step_paths(directory / CHECKPOINTS, LOCAL).values())
    except OSError as error:
        have = f"{error.filename}: {error.strerror}"
    raise UsageError(
        f"{directory} cannot be a run's directory",
        have=have,
        want="a readable directory, or a free name",
        do="set output_dir or name to another",
    )
