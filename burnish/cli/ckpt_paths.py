"""What a path on the command line of `burnish ckpt` stands for: a run, its `checkpoints/`, or one step."""

from __future__ import annotations

from pathlib import Path

from burnish.checkpoint.committed import Committed, newest, open_step, step_paths
from burnish.errors import MissingError
from burnish.files.storage import LocalStorage

CHECKPOINTS = "checkpoints"
"""The directory of steps in a run's directory."""


def is_step(path: Path) -> bool:
    """Whether this is the directory of a step, whole or not, by its name."""
    return path.is_dir() and path in step_paths(path.parent, LocalStorage()).values()


def steps_directory(path: Path) -> Path:
    """The directory of steps that a run's directory or itself is. Raises `MissingError`."""
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    if path.is_dir() and (path.name == CHECKPOINTS or step_paths(path, LocalStorage())):
        return path
    raise _missing(path)


def one_step(path: Path) -> Committed:
    """The step at `path`, or the newest healthy one where it is a run or its `checkpoints/`.

    Raises `MissingError` where there is none, and `CorruptError` for a damaged one.
    """
    if is_step(path):
        return open_step(path, LocalStorage())
    found = newest(steps_directory(path))
    if found is None:
        raise MissingError(f"{path} has no committed step", want="a run that has saved")
    return found


def steps_at(path: Path) -> list[Path]:
    """The step at `path`, or every step of the run that it is, oldest first. Raises `MissingError` where there is none."""
    if is_step(path):
        return [path]
    found = list(step_paths(steps_directory(path), LocalStorage()).values())
    if not found:
        raise MissingError(f"{path} has no committed step", want="a run that has saved")
    return found


def _missing(path: Path) -> MissingError:
    if not path.exists():
        near = path.parent
        while not near.exists():
            near = near.parent
        have = f"{near} with {', '.join(sorted(each.name for each in near.iterdir())[:8])}"
        return MissingError(f"there is no {path}", have=have, want="a run, or one of its steps")
    return MissingError(
        f"{path} holds no checkpoints",
        have="a directory" if path.is_dir() else "a file",
        want="runs/NAME, its checkpoints/, or a step-N in it",
    )
