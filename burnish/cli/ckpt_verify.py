"""`burnish ckpt verify`: whether steps are what was saved. Without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from burnish.checkpoint.verify import DamagedBlock, verify, verify_quickly
from burnish.cli.ckpt_outcome import Outcome, Say
from burnish.cli.ckpt_paths import source_of, steps_at
from burnish.cli.columns import bytes_text, count_text
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.storage import Source


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
