"""`burnish ckpt ls` and `show`: what is there. Without torch."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.destinations.remote_steps import RemoteSteps
from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.retention import read_pins
from burnish.checkpoint.steps import (
    INFLIGHT,
    PORTION,
    QUARANTINE,
    TRASH,
    Committed,
    open_step,
    step_paths,
)
from burnish.checkpoint.verify import checked_header
from burnish.cli.ckpt_outcome import Outcome, Say
from burnish.cli.ckpt_paths import one_step, source_of, steps_directory
from burnish.cli.columns import bytes_text, table
from burnish.errors import CorruptError, IncompatibleError
from burnish.files.safetensors import DTYPE_BITS, TensorEntry
from burnish.files.storage import Source


def list_steps(path: PurePath, say: Say) -> Outcome:
    """List a run's steps: size, time, health, pin, and what else is there. Raises for damaged pins after listing all."""
    root = steps_directory(path)
    source = source_of(root)
    pins, error = _pins(root, source)
    steps = [
        _listed(step, source, pins.get(number)) for number, step in step_paths(root, source).items()
    ]
    say(str(root))
    rows = [("step", "size", "saved", "state", "pinned"), *map(_row, steps)]
    for line in table(rows, right=2):
        say(f"  {line}")
    beside = _beside(root, source)
    for what, found in beside.items():
        if found:
            say(f"  {what}: {', '.join(found)}")
    return Outcome({"path": str(root), "steps": steps, **beside}, error)


def _pins(root: PurePath, source: Source) -> tuple[dict[int, str], CorruptError | None]:
    """The pins, or why there are none to show."""
    try:
        return read_pins(root, source), None
    except CorruptError as error:
        return {}, error


def _beside(root: PurePath, source: Source) -> dict[str, list[str]]:
    """What lies beside the steps."""
    if isinstance(source, RemoteSteps):
        unfinished = [path.name for path in source.unfinished()]
        return {"unfinished": unfinished, QUARANTINE: source.damaged(), TRASH: []}
    names = [entry.name for entry in source.entries(root)]
    return {
        "unfinished": [name for name in names if name.startswith((INFLIGHT, PORTION))],
        QUARANTINE: [entry.name for entry in source.entries(root / QUARANTINE)],
        TRASH: [entry.name for entry in source.entries(root / TRASH)],
    }


def show_step(path: PurePath, say: Say, *, tensors: bool) -> dict[str, Any]:
    """Show one step: who wrote it, its contents, the run's position; with `tensors` each of them."""
    step = one_step(path)
    source = source_of(step.path.parent)
    sets = _sets(step, source)
    facts = {
        "step": step.step,
        "healthy": step.healthy,
        "pinned": read_pins(step.path.parent, source).get(step.step),
        "bytes": step.manifest.total_bytes,
        "saved": _saved(step.path),
        "version": step.commit.version,
        "processes": step.manifest.world,
        "uuid": step.commit.uuid,
    }
    size = bytes_text(step.manifest.total_bytes)
    _say_section(
        say, str(step.path), [(name, _word(v)) for name, v in (facts | {"bytes": size}).items()]
    )
    heads = ("set", "dtype", "tensors", "elements", "size")
    _say_section(say, "tensors", [heads, *(_set_row(*each) for each in sets.items())])
    _say_section(say, "state", [(name, json.dumps(value)) for name, value in step.state.items()])
    counted = {name: {"tensors": len(found), "bytes": _size(found)} for name, found in sets.items()}
    report = {"path": str(step.path), **facts, "sets": counted, "state": dict(step.state)}
    if tensors:
        for name, entries in sets.items():
            _say_section(say, name, [(e.name, e.dtype, str(list(e.shape))) for e in entries])
        report["tensors"] = {name: list(map(_tensor, entries)) for name, entries in sets.items()}
    return report


def _listed(path: PurePath, source: Source, reason: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "pinned": reason}
    try:
        step = open_step(path, source)
    except (CorruptError, IncompatibleError) as error:
        found["damaged"] = isinstance(error, CorruptError)
        return {**found, "step": int(path.name.removeprefix("step-")), "problem": error.problem}
    size, saved = step.manifest.total_bytes, _saved(path)
    return {**found, "step": step.step, "bytes": size, "saved": saved, "healthy": step.healthy}


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    if "problem" in step:
        state = f"{'damaged: ' if step['damaged'] else ''}{step['problem']}"
        return (str(step["step"]), "", "", state, step["pinned"] or "")
    state = "healthy" if step["healthy"] else "unhealthy"
    size = bytes_text(step["bytes"])
    return (str(step["step"]), size, step["saved"], state, step["pinned"] or "")


def _say_section(say: Say, title: str, rows: list[tuple[str, ...]]) -> None:
    say(title)
    for line in table(rows):
        say(f"  {line}")


def _word(value: object) -> str:
    """A fact as people read it."""
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _saved(path: PurePath) -> str:
    """Return when a step was committed, by its file; "" on a mirror, which got it later."""
    if not isinstance(path, Path):
        return ""
    seconds = (path / COMMIT).stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _sets(step: Committed, source: Source) -> dict[str, list[TensorEntry]]:
    """The tensors of each set ("model", "training/exp_avg", ...), from checked headers."""
    sets: dict[str, list[TensorEntry]] = {}
    for name in sorted(step.manifest.files):
        directory, _, file = name.rpartition("/")
        if file.endswith(".safetensors"):
            stem = file.removesuffix(".safetensors").partition("-")[0]
            key = directory if directory.endswith(stem) else f"{directory}/{stem}"
            entries = checked_header(step, name, source).entries.values()
            sets.setdefault(key, []).extend(entries)
    return sets


def _set_row(name: str, entries: list[TensorEntry]) -> tuple[str, ...]:
    dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
    elements = sum((e.end - e.begin) * 8 // DTYPE_BITS[e.dtype] for e in entries)
    return (name, dtypes, f"{len(entries):,}", f"{elements:,}", bytes_text(_size(entries)))


def _size(entries: list[TensorEntry]) -> int:
    return sum(entry.end - entry.begin for entry in entries)


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    return {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)}
