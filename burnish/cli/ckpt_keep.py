"""`burnish ckpt pin`, `unpin` and `gc`: which steps stay. Without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from burnish.checkpoint.retention import Retention, holding_pins
from burnish.checkpoint.steps import TRASH, clear, leftovers, step_number, step_paths
from burnish.cli.ckpt_outcome import Outcome, Say
from burnish.cli.ckpt_paths import is_step, steps_directory
from burnish.cli.columns import bytes_text, count_text
from burnish.config.load import load_config
from burnish.config.places import mirror_url
from burnish.errors import MissingError, UsageError, few
from burnish.files.durable import Removals, move_aside, naming_failures
from burnish.files.lease import Lease
from burnish.files.storage import LocalStorage

_LOCAL = LocalStorage()


def pin(path: Path, reason: str, say: Say) -> dict[str, Any]:
    """Keep a step whatever retention says. Raises `MissingError` when it is not there (any more)."""
    root, step = _step_of(path)
    with naming_failures(f"{path} cannot be pinned"), holding_pins(root, _LOCAL) as pins:
        if not is_step(path):
            raise MissingError(
                f"there is no step {path}",
                have=_steps(root),
                want="a committed step",
                do="give one of these",
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
            raise MissingError(
                f"{path} is not pinned", have=have, want="a pinned step", do="give one of these"
            )
        before = pins.pop(step)
    say(f"{path} is no longer pinned (it was: {before})")
    return {"path": str(path), "step": step, "pinned": None, "before": before}


def collect_garbage(path: Path, say: Say, *, dry_run: bool) -> Outcome:
    """Remove steps that the configuration does not keep, and remains of killed processes.

    Refuses a directory in use. Leaves `quarantine/` alone. Raises after all else is gone if the disk kept something.
    """
    root = steps_directory(path)
    retention = _retention(root)
    removals = Removals(root)
    with naming_failures(f"{root} could not be cleared"), Lease(root / ".lease"):
        rest = leftovers(root, _LOCAL)
        with holding_pins(root, _LOCAL) as pins:
            gone = _outlived(retention, root, pins)
            freed = sum(map(_size, [*rest, *gone]))
            for step in () if dry_run else gone:
                with removals.trying():
                    move_aside(_LOCAL, step, root / TRASH)
        if not dry_run:
            clear(root, _LOCAL, removals)
            still = [step for step in gone if _LOCAL.kind(step) is not None]
            freed -= sum(map(_size, [*still, *leftovers(root, _LOCAL)]))
        kept = [str(p) for p in step_paths(root, _LOCAL).values() if not dry_run or p not in gone]
    removed = [str(p) for p in [*rest, *gone] if dry_run or _LOCAL.kind(p) is None]
    for name in removed:
        say(f"{'would remove' if dry_run else 'removed'} {name}")
    if retention is None:
        say(f"all steps are kept: no {root.parent / 'config.yaml'} says which may go")
    would = "would be " if dry_run else ""
    say(f"{bytes_text(freed)} {would}freed, {count_text(len(kept), 'step')} kept")
    report = {"path": str(root), "dry_run": dry_run, "removed": removed, "kept": kept}
    return Outcome(report | {"bytes": freed}, removals.error())


def _retention(root: Path) -> Retention | None:
    """What the run's configuration says; None where there is no configuration."""
    config = root.parent / "config.yaml"
    if not config.is_file():
        return None
    loaded = load_config(config).config
    return Retention.of(loaded.checkpoint, mirror_url(loaded))


def _outlived(retention: Retention | None, root: Path, pins: Iterable[int]) -> list[Path]:
    """The steps that may go; none where nothing says which."""
    if retention is None:
        return []
    paths = step_paths(root, _LOCAL)
    return [paths[step] for step in retention.removable(root, _LOCAL, pins)]


def _step_of(path: Path) -> tuple[Path, int]:
    step = step_number(path.name)
    if step is None:
        raise UsageError(
            f"{path} is not a step",
            have=path.name,
            want="RUN/checkpoints/step-N",
            do="give a step of a run; burnish ckpt ls RUN shows them",
        )
    if not path.parent.is_dir():
        raise MissingError(
            f"there is no {path.parent}", want="a run's checkpoints/", do="correct the path"
        )
    return path.parent, step


def _steps(root: Path) -> str:
    return few([step.name for step in step_paths(root, _LOCAL).values()]) or "none"


def _size(path: Path) -> int:
    return sum(each.lstat().st_size for each in [path, *path.rglob("*")] if each.is_file())
