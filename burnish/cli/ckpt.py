"""`burnish ckpt`: show, check and keep checkpoints.

Commands print lines for people, or with `--json` one object, which includes any `error`. Only `burnish.cli.ckpt_tensors` loads torch.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

from burnish.checkpoint.destinations.remote_steps import RemotePath, RemoteSteps
from burnish.checkpoint.retention import Retention, holding_pins, read_pins
from burnish.checkpoint.steps import (
    INFLIGHT,
    QUARANTINE,
    TRASH,
    CommittedStep,
    DamagedBlock,
    checked_header,
    clear,
    empty_directories,
    leftovers,
    open_step,
    step_number,
    step_paths,
    verify,
)
from burnish.checkpoint.tools.listing import listed_steps, newest_step, no_step, saved_at
from burnish.cli.arguments import DIFFERS
from burnish.cli.output import print_text
from burnish.config.document import recorded
from burnish.errors import (
    BurnishError,
    CorruptError,
    IncompatibleError,
    MissingError,
    UsageError,
    bytes_text,
    count_text,
    few,
    neighbours,
    table,
)
from burnish.files.durable import Removals, move_aside, naming_failures
from burnish.files.lease import LEASE, holding_lease
from burnish.files.remote import Remote
from burnish.files.safetensors import DTYPE_BITS, TensorEntry
from burnish.files.storage import LOCAL, Source
from burnish.tracking.rundir import CHECKPOINTS

Say = Callable[[str], None]
"""Prints a line for people, unless JSON was asked for."""
Report = dict[str, Any]
"""A command's findings or actions, as plain values; `error` is the `BurnishError` that it ends with, or None."""
P = TypeVar("P", bound=PurePath)

# Longest value of a step's state that is shown as it is.
_SHOWN_STATE = 80
# Values of the parser that commands do not take.
_PARSER_ONLY = ("command", "subcommand", "function", "json")


def run_ckpt(args: Namespace, function: Callable[..., Report]) -> int:
    """Run the function of the command that was parsed; return the exit code. Raises `BurnishError`."""
    options = {name: value for name, value in vars(args).items() if name not in _PARSER_ONLY}
    path = next(value for value in options.values() if isinstance(value, PurePath))

    def say(line: str) -> None:
        if not args.json:
            print_text(line)

    try:
        with naming_failures(f"{path} cannot be used"):
            report = function(say, **options)
    except BurnishError as error:
        report = {"error": error}
    failure: BurnishError | None = report.pop("error", None)
    if failure is not None:
        report["error"] = failure.parts() | {"exit_code": failure.exit_code}
    if args.json:
        print_text(json.dumps(report, ensure_ascii=False, indent=1))
    if failure is not None:
        raise failure
    return 0 if report.get("same", True) else DIFFERS


def _source_of(directory: PurePath) -> Source:
    """Return the reader of a directory of steps."""
    if isinstance(directory, RemotePath):
        return RemoteSteps(Remote(str(directory)))
    return LOCAL


def is_step(path: PurePath) -> bool:
    """Return whether a step exists at this path, healthy or damaged."""
    if step_number(path.name) is None or (isinstance(path, Path) and not LOCAL.kind(path)):
        return False
    return path in step_paths(path.parent, _source_of(path.parent)).values()


def one_step(path: PurePath) -> CommittedStep:
    """Return the step at `path`, or the newest healthy one of a run. Raises `MissingError`, and `CorruptError` for a damaged one."""
    if is_step(path):
        return open_step(path, _source_of(path.parent))
    directory = _steps_directory(path)
    return newest_step(directory, _source_of(directory))


def _steps_directory(path: P) -> P:
    if isinstance(path, RemotePath):
        names = Remote(str(path)).names()
    else:
        entries = LOCAL.entries(path) if Path(path).is_dir() else ()
        names = [entry.name for entry in entries if entry.kind == "directory"]
    if CHECKPOINTS in names:
        return path / CHECKPOINTS
    is_its_name = path.name == CHECKPOINTS and (names or (isinstance(path, Path) and path.is_dir()))
    if is_its_name or any(step_number(name) is not None for name in names):
        return path
    raise MissingError(
        f"there are no checkpoints at {path}",
        have=neighbours(path) if isinstance(path, Path) and not path.is_dir() else None,
        want="runs/NAME, its checkpoints/, or a step-N in it",
        do="correct the path, or the URL",
    )


def list_steps(say: Say, path: PurePath) -> Report:
    """List the steps of a run, or of all runs in a directory, and unfinished, damaged and removed ones."""
    if isinstance(path, Path) and (runs := _runs_in(path)):
        reports = [_list_of_run(say, run) for run in runs]
        errors = [report.pop("error") for report in reports]
        return {"path": str(path), "runs": reports, "error": next(filter(None, errors), None)}
    return _list_of_run(say, path)


def _runs_in(path: Path) -> list[Path]:
    """Return the runs in a directory that is none itself."""
    if not path.is_dir() or path.name == CHECKPOINTS or (path / CHECKPOINTS).is_dir():
        return []
    return sorted(child for child in path.iterdir() if (child / CHECKPOINTS).is_dir())


def _list_of_run(say: Say, path: PurePath) -> Report:
    root = _steps_directory(path)
    source = _source_of(root)
    steps, error = listed_steps(root, source)
    heads = ("step", "size", "saved", "state", "pinned")
    _say_section(say, str(root), [heads, *map(_row, steps)], right=2)
    beside = _beside(root, source)
    for what, names in beside.items():
        if names:
            say(f"  {what}: {', '.join(names)}")
    return {"path": str(root), "steps": steps, **beside, "error": error}


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    if "problem" in step:
        size = ""
        saved = ""
        state = f"{'damaged: ' if step['damaged'] else ''}{step['problem']}"
    else:
        size = bytes_text(step["bytes"])
        saved = step["saved"]
        state = "healthy" if step["healthy"] else "unhealthy"
    return (str(step["step"]), size, saved, state, step["pinned"] or "")


def _beside(root: PurePath, source: Source) -> dict[str, list[str]]:
    if isinstance(source, RemoteSteps):
        return {"unfinished": source.unfinished(), QUARANTINE: source.damaged(), TRASH: []}
    names = {
        directory: [entry.name for entry in source.entries(root / directory)]
        for directory in ("", QUARANTINE, TRASH)
    }
    unfinished = [name for name in names.pop("") if name.startswith(INFLIGHT)]
    return {"unfinished": unfinished, **names}


def show_step(say: Say, path: PurePath, *, tensors: bool) -> Report:
    """Show one step: who wrote it, its contents, the run's position."""
    step = one_step(path)
    sets = _sets(step)
    facts = {
        "step": step.step,
        "healthy": step.healthy,
        "pinned": read_pins(step.path.parent, step.source).get(step.step),
        "bytes": step.manifest.total_bytes,
        "saved": saved_at(step.path),
        "version": step.commit.version,
        "processes": step.manifest.world,
        "uuid": step.commit.uuid,
    }
    shown = facts | {"bytes": bytes_text(step.manifest.total_bytes)}
    _say_section(say, str(step.path), [(name, _word(value)) for name, value in shown.items()])
    heads = ("set", "dtype", "tensors", "elements", "size")
    _say_section(say, "tensors", [heads, *(_set_row(*each) for each in sets.items())])
    texts = {name: json.dumps(value) for name, value in step.state.items()}
    long = {name for name, text in texts.items() if len(text) > _SHOWN_STATE}
    texts |= {name: count_text(len(step.state[name]), "value") for name in long}
    _say_section(say, "state, which --json shows in full" if long else "state", [*texts.items()])
    counted = {name: {"tensors": len(found), "bytes": _size(found)} for name, found in sets.items()}
    report = {"path": str(step.path), **facts, "sets": counted, "state": dict(step.state)}
    listed = {
        name: [{"name": e.name, "dtype": e.dtype, "shape": list(e.shape)} for e in entries]
        for name, entries in (sets if tensors else {}).items()
    }
    for name, entries in listed.items():
        _say_section(say, name, [tuple(map(str, entry.values())) for entry in entries])
    return report | {"tensors": listed} if tensors else report


def _say_section(say: Say, title: str, rows: Sequence[Sequence[str]], right: int = 0) -> None:
    say(title)
    for line in table(rows, right):
        say(f"  {line}")


def _word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _sets(step: CommittedStep) -> dict[str, list[TensorEntry]]:
    sets: dict[str, list[TensorEntry]] = {}
    for name in sorted(step.manifest.files):
        directory, _, file = name.rpartition("/")
        if file.endswith(".safetensors"):
            stem = file.removesuffix(".safetensors").partition("-")[0]
            key = directory if directory.endswith(stem) else f"{directory}/{stem}"
            entries = checked_header(step, name).entries.values()
            sets.setdefault(key, []).extend(entries)
    return sets


def _set_row(name: str, entries: list[TensorEntry]) -> tuple[str, ...]:
    dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
    elements = sum((e.end - e.begin) * 8 // DTYPE_BITS[e.dtype] for e in entries)
    return (name, dtypes, f"{len(entries):,}", f"{elements:,}", bytes_text(_size(entries)))


def _size(entries: list[TensorEntry]) -> int:
    return sum(entry.end - entry.begin for entry in entries)


def verify_steps(say: Say, path: PurePath, *, fast: bool) -> Report:
    """Check a step, or every step of a run, and report each problem as it is found. Raises `MissingError` if all are gone."""
    steps = [path]
    if not is_step(path):
        root = _steps_directory(path)
        steps = list(step_paths(root, _source_of(root)).values())
    if not steps:
        raise no_step(path)
    results = [each for step in steps if (each := _verified(step, say, fast))]
    if not results:
        raise MissingError(
            f"{path} was removed while it was checked",
            want="a step that nobody removes",
            do="check the run as a whole, or pin the step first",
        )
    ok = all(result["ok"] for result in results)
    return {"full": not fast, "steps": results, "ok": ok, "error": _verdict(results)}


def _verdict(results: list[dict[str, Any]]) -> BurnishError | None:
    others = [each["path"] for each in results if each["other_format"]]
    damaged = [each for each in results if not each["ok"] and not each["other_format"]]
    if damaged:
        problems = sum(len(each["problems"]) for each in damaged)
        return CorruptError(
            count_text(len(damaged), "damaged step"),
            have=f"{count_text(problems, 'problem')} in {', '.join(each['path'] for each in damaged)}",
            want="the bytes that were committed",
            do="use another step, and check the disk; resuming moves a damaged step aside by itself",
        )
    if others:
        return IncompatibleError(
            f"{count_text(len(others), 'step')} of a format that this version does not read",
            have=", ".join(others),
            want="steps that can be checked",
            do="check them with the version of Burnish that wrote them, or a later one",
        )
    return None


def _verified(path: PurePath, say: Say, fast: bool) -> dict[str, Any] | None:
    """Return the report of a step, or None if it was removed."""
    begun = time.perf_counter()
    errors: list[BurnishError] = []
    source = _source_of(path.parent)
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
        verdict = "not checked"
        rate = ""
    say(f"{path}: {verdict} ({bytes_text(size)} in {seconds:.1f} s{rate})")
    extra = [] if errors else list(empty_directories(open_step(path, source)))
    if extra:
        say(f"  empty directories that are not part of the step: {few(extra)}")
    return {
        "path": str(path),
        "ok": not errors,
        "other_format": other_format,
        "bytes": size,
        "seconds": seconds,
        "extra": extra,
        "problems": [_problem(path, error) for error in errors],
    }


def _bytes(path: PurePath, source: Source) -> int:
    if source.kind(path) != "directory":
        return 0
    return sum(
        _bytes(path / entry.name, source) if entry.kind == "directory" else entry.size
        for entry in source.entries(path)
    )


def _problems(path: PurePath, source: Source, fast: bool) -> Iterator[BurnishError]:
    try:
        with naming_failures(f"{path} cannot be read"):
            yield from verify(path, source, fast=fast)
    except BurnishError as error:
        yield error


def _problem(path: PurePath, error: BurnishError) -> dict[str, Any]:
    fields: dict[str, Any] = error.parts()
    if isinstance(error, DamagedBlock):
        fields["file"] = error.file.relative_to(path).as_posix()
        fields |= {"start": error.start, "stop": error.stop, "tensors": list(error.holds)}
    return fields


def pin_step(say: Say, path: Path, *, reason: str) -> Report:
    """Keep a step whatever retention says. Raises `MissingError`, and `CorruptError` for a damaged one; does not read tensors."""
    step = _local_step(path)
    with naming_failures(f"{path} cannot be pinned"), holding_pins(path.parent, LOCAL) as pins:
        if not is_step(path):
            names = [step.name for step in step_paths(path.parent, LOCAL).values()]
            raise MissingError(
                f"there is no step {path}",
                have=few(names) or "none",
                want="a committed step",
                do="give one of these",
            )
        for error in verify(path, fast=True):
            raise error
        before = pins.get(step)
        pins[step] = reason
    say(f"{path} is pinned: {reason}{f' (before: {before})' if before else ''}")
    return {"path": str(path), "step": step, "pinned": reason, "before": before}


def unpin_step(say: Say, path: Path) -> Report:
    """Let retention decide again. Raises `MissingError` for a step that is not pinned."""
    step = _local_step(path)
    with naming_failures(f"{path} cannot be unpinned"), holding_pins(path.parent, LOCAL) as pins:
        if step not in pins:
            have = ", ".join(map(str, pins)) or "no pins"
            raise MissingError(
                f"{path} is not pinned", have=have, want="a pinned step", do="give one of these"
            )
        before = pins.pop(step)
    say(f"{path} is no longer pinned (it was: {before})")
    return {"path": str(path), "step": step, "pinned": None, "before": before}


def _local_step(path: Path) -> int:
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
    return step


def collect_garbage(say: Say, run: Path, *, dry_run: bool) -> Report:
    """Remove steps that the configuration does not keep, and remains of killed processes. Refuses a directory in use."""
    root = _steps_directory(run)
    config = root.parent / "config.yaml"
    gone = list[Path]()
    removals = Removals(root)
    with naming_failures(f"{root} could not be cleared"), holding_lease(root / LEASE):
        rest = leftovers(root, LOCAL)
        with holding_pins(root, LOCAL) as pins:
            if config.is_file():
                loaded = recorded(config)
                retention = Retention.of(loaded.checkpoint, loaded.mirror_url)
                paths = step_paths(root, LOCAL)
                gone = [paths[step] for step in retention.removable(root, LOCAL, pins)]
            freed = sum(map(_file_bytes, [*rest, *gone]))
            for step in () if dry_run else gone:
                with removals.trying():
                    move_aside(LOCAL, step, root / TRASH)
        if not dry_run:
            clear(root, LOCAL, removals)
            still = [step for step in gone if LOCAL.kind(step) is not None]
            freed -= sum(map(_file_bytes, [*still, *leftovers(root, LOCAL)]))
        stay = [str(p) for p in step_paths(root, LOCAL).values() if not dry_run or p not in gone]
    removed = [str(p) for p in [*rest, *gone] if dry_run or LOCAL.kind(p) is None]
    for name in removed:
        say(f"{'would remove' if dry_run else 'removed'} {name}")
    if not config.is_file():
        say(f"all steps are kept, because there is no {config}")
    would = "would be " if dry_run else ""
    say(f"{bytes_text(freed)} {would}freed, {count_text(len(stay), 'step')} kept")
    report = {"path": str(root), "dry_run": dry_run, "removed": removed, "kept": stay}
    return report | {"bytes": freed, "error": removals.error()}


def _file_bytes(path: Path) -> int:
    return sum(each.lstat().st_size for each in [path, *path.rglob("*")] if each.is_file())
