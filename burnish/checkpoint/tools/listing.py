"""List steps, whole or damaged."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.retention import read_pins
from burnish.checkpoint.steps import CommittedStep, newest, open_step, step_paths
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.durable import naming_failures
from burnish.files.storage import LOCAL, Source


def listed_steps(
    root: PurePath, source: Source
) -> tuple[list[dict[str, Any]], CorruptError | None]:
    """Return a directory's steps, oldest first, and what is wrong with its pins."""
    pins = {}
    problem = None
    try:
        pins = read_pins(root, source)
    except CorruptError as error:
        problem = error
    paths = step_paths(root, source)
    return [_step(path, source, n, pins.get(n)) for n, path in paths.items()], problem


def _step(path: PurePath, source: Source, number: int, reason: str | None) -> dict[str, Any]:
    listed: dict[str, Any] = {"path": str(path), "step": number, "pinned": reason}
    try:
        with naming_failures(f"{path} cannot be read"):
            step = open_step(path, source)
            saved = saved_at(path)
    except BurnishError as error:
        damaged = not isinstance(error, IncompatibleError)
        return {**listed, "damaged": damaged, "problem": error.problem}
    listed |= {"saved": saved, "healthy": step.healthy, "processes": step.manifest.world}
    return {**listed, "bytes": step.manifest.total_bytes, "files": len(step.manifest.files)}


def saved_at(path: PurePath) -> str:
    """Return when a step was committed; "" on a mirror, which got it later."""
    if not isinstance(path, Path):
        return ""
    seconds = (path / COMMIT).stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def newest_step(root: PurePath, source: Source = LOCAL) -> CommittedStep:
    """Return `newest`. Raises `MissingError` if none was ever committed."""
    step = newest(root, source)
    if step is None:
        raise no_step(root)
    return step


def no_step(root: PurePath) -> MissingError:
    """Return the error for a run that has not saved."""
    return MissingError(
        f"{root} has no committed step",
        want="a run that has saved",
        do="wait for its first save, or give another run",
    )
