"""Note how starts of a run failed, and refuse another start after equal failures.

A launcher cannot tell a machine that died from a reward that always raises at the same step.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from burnish.errors import BurnishError, UsageError
from burnish.tracking import logs

_EQUAL_FAILURES = 3
_NAME = "failures.jsonl"
_LONGEST_LINE = 300
# Parts of an error's text that differ from rank to rank.
_OTHERS = re.compile(r"^rank \d+ \(.*?\) (?=failed|died)| while rank \d+ was in .*")


def forget_failures(directory: Path) -> None:
    """Forget the failures, because a person has started the run."""
    (directory / _NAME).unlink(missing_ok=True)


def note_failure(directory: Path, error: Exception) -> None:
    """Note an error that ends this rank, if the run already has its directory."""
    if directory.is_dir():
        spans = logs.spans()
        line = {"step": spans and spans.step, "error": _head(error)}
        # The disk may be what failed.
        with suppress(OSError), (directory / _NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")


def refuse_failing_alike(directory: Path) -> None:
    """Raise `UsageError` if the last starts failed at the same step with the same error."""
    path = directory / _NAME
    lines = path.read_text().splitlines()[-_EQUAL_FAILURES:] if path.is_file() else []
    if len(lines) < _EQUAL_FAILURES or len({*lines}) > 1:
        return
    last = json.loads(lines[-1])
    where = "before its first step" if last["step"] is None else f"in step {last['step']}"
    raise UsageError(
        f"the run failed {_EQUAL_FAILURES} times with the same error {where}, so it is not started again",
        have=last["error"],
        want="an error that may pass when the run is started again",
        do=f"see {directory}, mend the cause, and give the same command: it continues from the newest checkpoint",
    )


def _head(error: Exception) -> str:
    """Return an error's kind and first line without numbers, which differ from start to start."""
    kind = f"{type(error).__name__}: "
    text = str(error)
    if isinstance(error, BurnishError):
        is_anothers = error.printed_by_main and error.have is not None
        kind = ""
        text = str(error.have) if is_anothers else error.problem
    line = _OTHERS.sub("", text).strip().partition("\n")[0]
    return re.sub(r"\d+", "#", kind + line)[:_LONGEST_LINE]
