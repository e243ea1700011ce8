"""Tell how the last start of a run ended, and record why it failed. Loads no torch."""

from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.lease import LEASE, is_held
from burnish.redaction import redacted
from burnish.tracking import logs
from burnish.tracking.rundir import ENDED, REASON, START, STATE, STEPS, RunDirectory

_PARTS = ("problem", "have", "want", "do")
_LONGEST = 4000
_RANK = re.compile(r"rank \d+")
# Where a line of a log was written, as text and as JSON.
_PLACE = re.compile(r'rank \d+ step (\d+|-) (\S+) |"step": (\d+|null), "phase": "?([^",]+)')
_CRASHES = ("Fatal Python error", "burnish: ")
# A run on another machine whose lock cannot be seen lives if its files have changed within this time.
_QUIET_SECONDS = 900.0

_log = logging.getLogger("burnish")


class Ending(NamedTuple):
    """How a run stands."""

    state: str
    """running, finished, stopped (by a signal), failed, silent (a copy that nobody writes), or ended if an old version's run does not say how."""
    reason: dict[str, Any] | None = None
    """Why it failed: the parts of the error, and its step (None: before the first)."""
    ended: str | None = None
    """The time, in ISO 8601; of a silent copy the last change."""


def ending(run: RunDirectory) -> Ending:
    """Return how a run stands. A copy, such as a mirror's, cannot show whether its process lives. Raises `CorruptError` and `OSError`."""
    lease = run.checkpoints / LEASE
    if is_held(lease):
        return Ending("running")
    status = run.read_status()
    state = str(status.get(STATE, "ended"))
    ended = status.get(ENDED)
    # Every run's own directory has a lease.
    is_copy = not lease.exists()
    if state == "running" and not _may_live(run, is_copy):
        when = datetime.fromtimestamp(_last_change(run), UTC).isoformat(timespec="seconds")
        return (
            Ending("silent", None, when) if is_copy else Ending("failed", _reason_in_log(run), when)
        )
    reason = status.get(REASON)
    if state == "failed" and not isinstance(reason, Mapping):  # an old version's run
        reason = _reason_in_log(run)
    return Ending(
        state,
        _checked(reason) if state == "failed" and isinstance(reason, Mapping) else None,
        ended if isinstance(ended, str) else None,
    )


def _checked(reason: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: reason.get(name) for name in _PARTS}
    step = reason.get("step")
    return {
        **{name: None if text is None else str(text) for name, text in texts.items()},
        "step": step if isinstance(step, int) else None,
    }


def _may_live(run: RunDirectory, is_copy: bool) -> bool:
    """Return whether a run that ended without a word, or runs where its lock cannot be seen, may be running."""
    is_here = run.read_environment().get("host") in (None, platform.node())
    return (is_copy or not is_here) and time.time() - _last_change(run) < _QUIET_SECONDS


def _last_change(run: RunDirectory) -> float:
    times = [0.0]
    for path in (run.status, run.metrics, run.logs / "rank-0.log"):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _reason_in_log(run: RunDirectory) -> dict[str, Any]:
    """Return why a run failed that could not record it: what its log has last."""
    lines = logs.tail(run.logs / "rank-0.log")
    places = [match for line in lines if (match := _PLACE.search(line))]
    step, phase = next(((m[1] or m[3], m[2] or m[4]) for m in reversed(places)), ("-", "-"))
    number = int(step) if step.isdecimal() else None
    where = "before its first step" if number is None else f"in step {number}"
    where += "" if phase in ("-", "null") else f", in {phase}"
    crash = next((line for line in reversed(lines) if line.startswith(_CRASHES)), None)
    raised = any(" critical rank " in line or '"level": "critical"' in line for line in lines)
    if crash is not None:
        problem = crash.removeprefix("burnish: ")
    elif raised and lines[-1].startswith("    "):
        problem = lines[-1].strip()
    else:
        problem = f"the process vanished {where}"
    do = "look for what ended it (kill -9, the out-of-memory killer, a reboot); the same command continues from the newest checkpoint"
    have = str(run.logs / "rank-0.log") if lines else "no log"
    return {"problem": problem, "have": have, "want": None, "do": do, "step": number}


def reason_of(error: BaseException) -> dict[str, Any]:
    """Return the parts of an error that ends this process's run, as text without credentials."""
    spans = logs.spans()
    where: dict[str, Any] = {"step": spans and spans.step}
    if not isinstance(error, BurnishError):
        text = (str(error).strip() or "no text").partition("\n")[0]
        problem = f"{type(error).__name__}: {text}"
        do = "see the traceback in logs/rank-0.log"
        parts: dict[str, str | None] = {"problem": problem, "have": None, "want": None, "do": do}
    else:
        parts = error.parts()
        if error.printed_by_main and parts["have"] and (rank := _RANK.match(error.problem)):
            # Another rank's error, whose text is what has gone wrong.
            problem, _, rest = parts["have"].partition("\n")
            parts |= {"problem": f"{rank[0]}: {problem}", "have": rest.strip() or None}
    return {n: text and redacted(text)[:_LONGEST] for n, text in parts.items()} | where


def record_failure(
    run: RunDirectory, mirror_url: str | None, layout: Layout, error: BaseException
) -> None:
    """Record in status.json why the run failed that this process has begun, here and on the mirror. Never raises.

    If rank 0 was killed, rank 1 does it.
    """
    try:
        status = run.read_status()
        if status.get(STATE) in ("finished", "stopped"):  # what failed then is only its mirror
            return
        is_heir = layout.rank == 1 and type(error) is BurnishError
        if not (layout.is_main or (is_heir and not is_held(run.checkpoints / LEASE))):
            return
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = None if state == "stopped" else reason_of(error)
        if (status.get(STATE), status.get(REASON)) != (state, reason):
            run.write_status(status.get(STEPS), state, reason)
            if run.report.exists():
                from burnish.tracking.report import write_report

                write_report(run.root)
        if mirror_url is not None:
            _tell_mirror(run, mirror_url)
    except (BurnishError, OSError) as problem:
        _log.warning("status.json does not say that the run failed: %s", problem)


def _tell_mirror(run: RunDirectory, url: str) -> None:
    from burnish.checkpoint.destinations.mirror import Mirror
    from burnish.files.remote import Remote, RetryPolicy

    start = str(run.read_environment().get(START))
    mirror = Mirror(run.root, Remote(url, RetryPolicy(tries=2, seconds=10.0)), None, start)
    mirror.check()
    for path in (run.status, run.report):
        if path.exists():
            mirror.remote.put(path.name, path.read_bytes())


def last_failure(run: RunDirectory) -> str | None:
    """Return one line about the last start of a run, if that failed."""
    with suppress(BurnishError, OSError):
        state, reason, _ = ending(run)
        if state == "failed" and reason is not None:
            where = "" if reason["step"] is None else f" in step {reason['step']}"
            return f"the last attempt failed{where}: {first_line(reason)}"
    return None


def first_line(reason: Mapping[str, Any]) -> str:
    """Return what has gone wrong, in one line."""
    return str(reason["problem"]).partition("\n")[0]
