"""What the commands of `burnish ckpt` share: their output, and the steps at a path or URL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from burnish.checkpoint.destinations.remote_steps import RemotePath, RemoteSteps
from burnish.checkpoint.steps import Committed, newest, open_step, step_number, step_paths
from burnish.errors import BurnishError, MissingError, few
from burnish.files.remote import Remote
from burnish.files.storage import LocalStorage, Source
from burnish.files.urls import Url, is_url
from burnish.tracking.rundir import CHECKPOINTS

Say = Callable[[str], None]
"""Prints a line for people; does nothing where JSON was asked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    report: dict[str, Any]
    """What it found or did, as plain values."""
    error: BurnishError | None = None
    """What it ends with; None where all is well."""

    def as_json(self) -> dict[str, Any]:
        """The report, with the error beside it where there is one."""
        if self.error is None:
            return self.report
        return self.report | {"error": self.error.parts() | {"exit_code": self.error.exit_code}}


_DO = "correct the path, or the URL"

P = TypeVar("P", bound=PurePath)


def place(text: str) -> PurePath:
    """Return a local path or a URL. Raises `UsageError` if it is neither."""
    return RemotePath.of(Url.parse(text)) if is_url(text) else Path(text)


def source_of(directory: PurePath) -> Source:
    """What reads a directory of steps."""
    if isinstance(directory, RemotePath):
        return RemoteSteps(Remote(str(directory)))
    return LocalStorage()


def is_step(path: PurePath) -> bool:
    """Whether this is the directory of a step, whole or not, by its name."""
    if step_number(path.name) is None or (isinstance(path, Path) and not path.is_dir()):
        return False
    return path in step_paths(path.parent, source_of(path.parent)).values()


def steps_directory(path: P) -> P:
    """The directory of steps that a run's directory or itself is. Raises `MissingError`."""
    kinds = _directories(path)
    if CHECKPOINTS in kinds:
        return path / CHECKPOINTS
    if kinds and (path.name == CHECKPOINTS or any(step_number(name) is not None for name in kinds)):
        return path
    if path.name == CHECKPOINTS and isinstance(path, Path) and path.is_dir():
        return path
    raise _missing(path)


def one_step(path: PurePath) -> Committed:
    """Return the step at `path`, or the newest healthy one of a run or its `checkpoints/`.

    Raises `MissingError` if there is none, and `CorruptError` for a damaged one.
    """
    if is_step(path):
        return open_step(path, source_of(path.parent))
    directory = steps_directory(path)
    found = newest(directory, source_of(directory))
    if found is None:
        raise _empty(path)
    return found


def steps_at(path: P) -> list[P]:
    """Return the step at `path`, or every step of a run, oldest first. Raises `MissingError` if there is none."""
    if is_step(path):
        return [path]
    directory = steps_directory(path)
    found = list(step_paths(directory, source_of(directory)).values())
    if not found:
        raise _empty(path)
    return found


def _empty(path: PurePath) -> MissingError:
    return MissingError(
        f"{path} has no committed step",
        want="a run that has saved",
        do="give another run, or wait for its first save",
    )


def _directories(path: PurePath) -> list[str]:
    """What is directly in a directory here, or behind a URL."""
    if isinstance(path, RemotePath):
        return Remote(str(path)).names()
    return [entry.name for entry in LocalStorage().entries(path) if entry.kind == "directory"]


def _missing(path: PurePath) -> MissingError:
    if not isinstance(path, Path):
        return MissingError(
            f"there are no checkpoints at {path}", want="a run, or one of its steps", do=_DO
        )
    if not path.exists():
        near = path.parent
        while not near.exists():
            near = near.parent
        have = f"{near} with {few(sorted(each.name for each in near.iterdir()))}"
        return MissingError(
            f"there is no {path}", have=have, want="a run, or one of its steps", do=_DO
        )
    return MissingError(
        f"{path} holds no checkpoints",
        have="a directory" if path.is_dir() else "a file",
        want="runs/NAME, its checkpoints/, or a step-N in it",
        do=_DO,
    )
