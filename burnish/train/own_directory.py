"""Tell whether a directory is a run's, and whether this run may use it, before torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from burnish.checkpoint.steps import step_paths
from burnish.config.document import recorded
from burnish.config.resume import RunIdentity
from burnish.errors import MissingError, UsageError
from burnish.files.storage import LocalStorage
from burnish.tracking.rundir import CHECKPOINTS, TRAINER, RunDirectory


def recorded_config(run_dir: Path) -> Path:
    """The configuration that a run's directory holds. Raises `MissingError` where it holds none."""
    path = RunDirectory(run_dir).config
    if not path.is_file():
        raise MissingError(
            f"{run_dir} is not a run's directory",
            have=f"a directory without {path.name}",
            want="a directory that burnish sft or rl wrote, or a configuration file",
            do="give runs/NAME",
        )
    return path


def require_own_directory(directory: RunDirectory, run: RunIdentity) -> None:
    """Refuse the directory of another command or configuration, or one with steps if `resume` is never.

    A start that failed before it did anything leaves a directory that another configuration may take.
    """
    steps = [path.name for path in committed_steps(directory.root)]
    if steps or directory.begun:
        found = directory.read_environment().get(TRAINER, run.trainer)
        run.require_trainer(directory.root, found)
        if directory.config.exists():
            run.require_same(directory.root, recorded(directory.config))
    run.require_may_resume(directory.root, steps)


def committed_steps(directory: Path) -> list[Path]:
    """Return the checkpoints in a run's directory, oldest first. Raises `UsageError` if a file stands in its place."""
    parents = (directory, *directory.parents)
    file = next((each for each in parents if os.path.lexists(each) and not each.is_dir()), None)
    have = None if file is None else f"{file}, which is no directory"
    try:
        if have is None:
            return list(step_paths(directory / CHECKPOINTS, LocalStorage()).values())
    except OSError as error:
        have = f"{error.filename}: {error.strerror}"
    raise UsageError(
        f"{directory} cannot be a run's directory",
        have=have,
        want="a directory that may be read, or a name that is free",
        do="set output_dir and name to others",
    )
