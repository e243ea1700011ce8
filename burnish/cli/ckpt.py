"""`burnish ckpt`: look at checkpoints, check and keep them.

Commands print lines for people, or with `--json` one object on standard output, with any `error` in it. Exit codes are those of
`burnish.errors`: 3 for damage, 4 if all steps have another format, 6 for a difference. Only commands that look into tensors load
torch.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace as Arguments
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.destinations.remote_steps import RemoteSteps
from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.retention import Retention, holding_pins, read_pins
from burnish.checkpoint.steps import (
    INFLIGHT,
    PORTION,
    QUARANTINE,
    TRASH,
    Committed,
    clear,
    leftovers,
    open_step,
    step_number,
    step_paths,
)
from burnish.checkpoint.verify import DamagedBlock, checked_header, verify, verify_quickly
from burnish.cli.ckpt_arguments import DIFFERS
from burnish.cli.ckpt_paths import (
    Outcome,
    Say,
    is_step,
    one_step,
    source_of,
    steps_at,
    steps_directory,
)
from burnish.cli.columns import bytes_text, count_text, table
from burnish.cli.output import print_text
from burnish.config.load import load_config
from burnish.errors import (
    BurnishError,
    CorruptError,
    IncompatibleError,
    MissingError,
    UsageError,
    few,
)
from burnish.files.durable import Removals, move_aside, naming_failures
from burnish.files.lease import Lease
from burnish.files.safetensors import DTYPE_BITS, TensorEntry
from burnish.files.storage import LocalStorage, Source


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
        return {"unfinished": source.unfinished(), QUARANTINE: source.damaged(), TRASH: []}
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


def verify_steps(path: PurePath, say: Say, *, fast: bool) -> Outcome:
    """Check a step, or every step of a run, and report each problem as it is found.

    Steps that retention removes meanwhile are passed over. Raises `MissingError` if all are gone.
    """
    results = [each for step in steps_at(path) if (each := _verified(step, say, fast))]
    if not results:
        raise MissingError(
            f"{path} was removed while it was checked",
            want="a step that stays",
            do="check the run as a whole, or pin the step first",
        )
    report = {"full": not fast, "steps": results, "ok": all(result["ok"] for result in results)}
    return Outcome(report, _damage(results) or _unread(results))


def _damage(results: list[dict[str, Any]]) -> CorruptError | None:
    bad = [each for each in results if not each["ok"] and not each["other_format"]]
    if not bad:
        return None
    problems = sum(len(each["problems"]) for each in bad)
    return CorruptError(
        f"{count_text(len(bad), 'damaged step')}",
        have=f"{count_text(problems, 'problem')} in {', '.join(each['path'] for each in bad)}",
        want="the bytes that were committed",
        do="use another step, and check the disk; resuming moves a damaged step aside by itself",
    )


def _unread(results: list[dict[str, Any]]) -> IncompatibleError | None:
    others = [each["path"] for each in results if each["other_format"]]
    if not others:
        return None
    return IncompatibleError(
        f"{count_text(len(others), 'step')} of a format that this version does not read",
        have=", ".join(others),
        want="steps that can be checked",
        do="check them with the version of Burnish that wrote them, or a later one",
    )


def _verified(path: PurePath, say: Say, fast: bool) -> dict[str, Any] | None:
    """What is reported of a step; None where it is gone."""
    begun = time.perf_counter()
    errors: list[BurnishError] = []
    source = source_of(path.parent)
    for error in _problems(path, source, fast):
        if source.kind(path) is None:
            say(f"{path}: removed meanwhile")
            return None
        errors.append(error)
        say(f"{error}")
    seconds = time.perf_counter() - begun
    size = _bytes(path, source)
    rate = "" if fast else f", {bytes_text(size / seconds)}/s"
    verdict = count_text(len(errors), "problem") if errors else "whole"
    other_format = bool(errors) and all(isinstance(each, IncompatibleError) for each in errors)
    if other_format:
        verdict, rate = "not checked", ""
    say(f"{path}: {verdict} ({bytes_text(size)} in {seconds:.1f} s{rate})")
    return {
        "path": str(path),
        "ok": not errors,
        "other_format": other_format,
        "bytes": size,
        "seconds": seconds,
        "problems": [_problem(path, error) for error in errors],
    }


def _bytes(path: PurePath, source: Source) -> int:
    """Of all files below a directory."""
    return sum(
        _bytes(path / entry.name, source) if entry.kind == "directory" else entry.size
        for entry in source.entries(path)
    )


def _problems(path: PurePath, source: Source, fast: bool) -> Iterator[BurnishError]:
    try:
        yield from (verify_quickly if fast else verify)(path, source)
    except (CorruptError, IncompatibleError) as error:
        yield error


def _problem(path: PurePath, error: BurnishError) -> dict[str, Any]:
    """A problem as JSON."""
    found: dict[str, Any] = error.parts()
    if isinstance(error, DamagedBlock):
        found["file"] = error.file.relative_to(path).as_posix()
        found |= {"start": error.start, "stop": error.stop, "tensors": list(error.holds)}
    return found


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
            freed = sum(map(_file_bytes, [*rest, *gone]))
            for step in () if dry_run else gone:
                with removals.trying():
                    move_aside(_LOCAL, step, root / TRASH)
        if not dry_run:
            clear(root, _LOCAL, removals)
            still = [step for step in gone if _LOCAL.kind(step) is not None]
            freed -= sum(map(_file_bytes, [*still, *leftovers(root, _LOCAL)]))
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
    return Retention.of(loaded.checkpoint, loaded.mirror_url)


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


def _file_bytes(path: Path) -> int:
    return sum(each.lstat().st_size for each in [path, *path.rglob("*")] if each.is_file())


def run_ckpt(arguments: Arguments) -> int:
    """Run the command that was parsed; returns the exit code. Raises `BurnishError`s for all that is wrong."""

    def say(line: str) -> None:
        if not arguments.json:
            print_text(line)

    try:
        with naming_failures(f"{arguments.path} cannot be used"):
            outcome = _COMMANDS[arguments.ckpt_command](arguments, say)
    except BurnishError as error:
        outcome = Outcome({}, error)
    if arguments.json:
        print_text(json.dumps(outcome.as_json(), ensure_ascii=False, indent=1))
    if outcome.error is not None:
        raise outcome.error
    return 0 if outcome.report.get("same", True) else DIFFERS


def _diff(given: Arguments, say: Say) -> Outcome:
    from burnish.cli import ckpt_tensors

    return Outcome(ckpt_tensors.diff(given.path, given.other, say))


def _export(given: Arguments, say: Say) -> Outcome:
    from burnish.cli import ckpt_tensors

    step = one_step(given.path)
    model = ckpt_tensors.exportable(step, given.role, given.base, merged=given.merged)
    target, size = given.target, given.shard_gb
    return Outcome(ckpt_tensors.export_step(step, model, target, given.dtype, size, say))


def _import(given: Arguments, say: Say) -> Outcome:
    from burnish.cli import ckpt_tensors

    unpickling: ckpt_tensors.Unpickling = "never"
    if given.unsafe_pickle:
        unpickling = "anyhow" if given.without_sandbox else "sandboxed"
    step, assets = given.step, given.assets
    return Outcome(
        ckpt_tensors.import_weights(given.path, given.run, step, assets, say, unpickling=unpickling)
    )


_Command = Callable[[Arguments, Say], Outcome]

_COMMANDS: dict[str, _Command] = {
    "ls": lambda given, say: list_steps(given.path, say),
    "show": lambda given, say: Outcome(show_step(given.path, say, tensors=given.tensors)),
    "verify": lambda given, say: verify_steps(given.path, say, fast=given.fast),
    "diff": _diff,
    "export": _export,
    "import": _import,
    "pin": lambda given, say: Outcome(pin(given.path, given.reason, say)),
    "unpin": lambda given, say: Outcome(unpin(given.path, say)),
    "gc": lambda given, say: collect_garbage(given.path, say, dry_run=given.dry_run),
}
