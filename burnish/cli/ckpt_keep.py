"""`burnish ckpt pin` and `unpin`: which steps stay. Without torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from burnish.checkpoint.committed import step_paths
from burnish.checkpoint.pins import holding_pins
from burnish.cli.ckpt_inspect import Say
from burnish.cli.ckpt_paths import is_step
from burnish.errors import MissingError, UsageError
from burnish.files.durable import naming_failures
from burnish.files.storage import LocalStorage

_LOCAL = LocalStorage()
_STEP = re.compile(r"step-([0-9]{8,18})")


def pin(path: Path, reason: str, say: Say) -> dict[str, Any]:
    """Keep a step whatever retention says. Raises `MissingError` when it is not there (any more)."""
    root, step = _step_of(path)
    with naming_failures(f"{path} cannot be pinned"), holding_pins(root, _LOCAL) as pins:
        if not is_step(path):
            raise MissingError(
                f"there is no step {path}", have=_steps(root), want="a committed step"
            )
        before = pins.get(step)
        pins[step] = reason
    say(f"{path} is pinned: {reason}{f' (before: {before})' if before else ''}")
    return {"path": str(path), "step": step, "pinned": reason, "before": before}


def unpin(path: Path, say: Say) -> dict[str, Any]:
    """Let retention decide again. Raises `MissingError` for a step that is not pinned."""
    root, step = _step_of(path)
    with naming_failures(f"{path} cannot be unpinned"), holding_pins(root, _LOCAL) as pins:
        if step not in pins:
            have = ", ".join(map(str, pins)) or "no pins"
            raise MissingError(f"{path} is not pinned", have=have, want="a pinned step")
        before = pins.pop(step)
    say(f"{path} is no longer pinned (it was: {before})")
    return {"path": str(path), "step": step, "pinned": None, "before": before}


def _step_of(path: Path) -> tuple[Path, int]:
    match = _STEP.fullmatch(path.name)
    if not match:
        raise UsageError(f"{path} is not a step", have=path.name, want="RUN/checkpoints/step-N")
    if not path.parent.is_dir():
        raise MissingError(f"there is no {path.parent}", want="a run's checkpoints/")
    return path.parent, int(match[1])


def _steps(root: Path) -> str:
    return ", ".join(step.name for step in step_paths(root, _LOCAL).values()) or "none"
