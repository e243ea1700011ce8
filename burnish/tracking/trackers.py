"""Record each step's numbers in trackers.

`metrics.jsonl` is the record of a run: one JSON object a step. NaN and infinities are the strings "NaN", "Infinity" and
"-Infinity", as in protobuf's JSON; `float()` reads them.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from burnish.errors import CorruptError, refusing
from burnish.extend import TRACKERS
from burnish.files.storage import open_regular
from burnish.tracking.rundir import write_atomically

END_SECONDS = 60.0
"""Seconds to send the rest of a run."""
_BURST_SECONDS = 10.0  # until a background tracker makes the waiting calls
_OF_STEPS = ("log", "log_rollouts", "log_traces")  # methods whose first argument is a step
# Most calls of each method that wait for a tracker.
_ROOM: Mapping[str, int] = MappingProxyType({"log": 10_000, "log_rollouts": 16, "log_file": 64})
_CHARACTERS = 2000  # most characters of a warning
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False)

log = logging.getLogger("burnish")

State = Literal["running", "finished", "stopped", "failed"]
FileKind = Literal["report", "checkpoint"]


class Tracker(Protocol):
    """Takes the numbers of each step. Methods that a subclass omits do nothing.

    `tracking.trackers` names the class. If its constructor takes `resume_step`, it gets the last step to keep (None: a new
    run), and `log` then gets every later step again. Otherwise `log` gets each step once in the life of the run. Optional methods, without
    a result:

    - `log_rollouts(step, kind, rows)`: samples of a "step" or a "validation", as in the rollout files, before the step's numbers
    - `log_file(path, kind)`: the "report" at the end, or a reference to the "checkpoint" of a committed step
    - `end(state)`: how the run ended, before `close`
    """

    def __init__(self, directory: Path) -> None:
        """Open it for the run in `directory`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's numbers by name (`actor/pg_loss`), NaN and infinity included. Steps ascend. Raises `OSError`."""

    def sync(self) -> None:
        """Write held numbers, every few seconds and at checkpoints, so that they survive a kill or power loss. Raises `OSError`."""
        return

    def close(self) -> None:
        """Write out held numbers and free resources. A second call does nothing."""
        return


class BackgroundTracker(Tracker):
    """Feed a tracker from a thread of its own, every ten seconds, so that it never stops or slows training.

    Calls that find no room, fail or come too late are lost. The log has one warning and, at the end, the number of lost calls.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        directory: Path,
        *,
        resume_step: int | None = None,
        room: Mapping[str, int] = _ROOM,
    ) -> None:
        """Call `make(directory)` in the thread. `room` bounds the waiting calls of each method."""
        self._name = name
        self._make = make
        self._room = room
        self._directory = directory
        self._resume_step = resume_step
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._waiting: Counter[str] = Counter()
        self._lost = 0
        self._warned = False
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._tracker: Any = None
        self.is_made = False
        """Whether the tracker is made, or has failed to be."""
        self._end: State | None = None
        self._step_file = directory / "trackers" / re.sub(r"[^\w.-]+", "_", name)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name=f"burnish-{name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand a step's numbers over."""
        self.tell("log", step, dict(values))

    def tell(self, method: str, *arguments: Any) -> None:
        """Have the thread call a method of the tracker, if there is room."""
        if method not in self._room:
            return
        with self._lock:
            waiting = self._waiting[method]
            room = self._room[method]
            if waiting < room:
                self._waiting[method] += 1
                self._calls.append((method, arguments))
            else:
                self._lost += 1
        if waiting >= room:
            self._warn(f"{waiting} calls of {method} are waiting for it")
        if 2 * waiting >= room:
            self._wake.set()

    def sync(self) -> None:
        """Have the thread make waiting calls and sync; do not wait."""
        self._wake.set()

    def finish(self, state: State, deadline: float) -> None:
        """Announce the last call. `close` waits until `deadline` of the monotonic clock."""
        if not self._deadline:
            self._deadline = deadline
            self._end = state
            self._wake.set()

    def close(self) -> None:
        """Wait for the tracker to take the rest and close, until the deadline; log how much is lost."""
        self.finish("finished", time.monotonic() + END_SECONDS)
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        thread.join(max(0.0, self._deadline - time.monotonic()))
        if thread.is_alive():
            self._warn("did not close in time")
        with self._lock:
            lost = self._lost + self._waiting.total()
        if lost:
            log.warning("tracker %s: %d calls are lost", self._name, lost)

    def _warn(self, problem: object) -> None:
        if not self._warned:
            self._warned = True
            text = (repr(problem) if isinstance(problem, Exception) else str(problem))[:_CHARACTERS]
            log.warning("tracker %s: %s. Training goes on without it", self._name, text)

    def _serve(self) -> None:
        keeps = "resume_step" in inspect.signature(self._make).parameters
        options = {"resume_step": self._resume_step} if keeps else {}
        try:
            self._tracker = self._make(self._directory, **options)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self._warn(error)
        self.is_made = True
        newest = -1 if keeps else max(self._last_step(), getattr(self._tracker, "last_step", -1))
        is_last = False
        while not is_last:
            self._wake.wait(_BURST_SECONDS)
            self._wake.clear()
            is_last = self._end is not None
            self._take(newest, note=not keeps)
        self._call("end", self._end)
        self._call("close")

    def _take(self, newest: int, *, note: bool) -> None:
        """Make the waiting calls, except those of steps up to `newest`."""
        with self._lock:
            calls = self._calls
            self._calls = []
        new = [call for call in calls if call[0] not in _OF_STEPS or call[1][0] > newest]
        done = [call for call in new if self._call(call[0], *call[1])]
        steps = [arguments[0] for method, arguments in done if method in ("log", "log_traces")]
        # Calls that were not synced may never arrive, so they count as lost.
        if done and not self._call("sync"):
            done = []
        elif steps and note:
            with suppress(OSError):  # only a killed run needs the file
                self._step_file.parent.mkdir(exist_ok=True)
                self._step_file.write_text(f"{steps[-1]}\n")
        with self._lock:
            self._lost += len(new) - len(done)
            self._waiting.subtract(method for method, _ in calls)

    def _call(self, method: str, *arguments: Any) -> bool:
        """Make a call; return whether it succeeds or the tracker lacks the method."""
        if self._tracker is None:
            return False
        try:
            getattr(self._tracker, method, lambda *_: None)(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self._warn(error)
            return False
        return True

    def _last_step(self) -> int:
        try:
            return int(self._step_file.read_text())
        except (OSError, ValueError):  # a new run, or a machine that died while writing the file
            return -1


def load_tracker(name: str) -> type[Tracker]:
    """Return the class that an entry of `tracking.trackers` names. Raises `UsageError` if there is none, or it cannot be a tracker."""
    tracker = TRACKERS.load(name, "tracking.trackers")
    getattr(tracker, "require_ready", lambda: None)()
    return tracker


class JsonlTracker(Tracker):
    """Append to `path`, flushed after every step. Resuming first cuts later and half-written lines; None begins an empty file."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        is_new = resume_step is None or not path.exists()
        rows = [] if is_new else _rows(path)
        lines = [line + b"\n" for line, row in rows if row["step"] <= (resume_step or 0)]
        write_atomically(path, b"".join(lines))
        # Unbuffered, so that closing does not retry a failed write.
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the step's object: `step` first, then the values in the order given."""
        line = json_line({"step": step, **json_numbers(values)}).encode()
        while line:
            line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Force the file to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Force the file to the disk and close it."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def json_number(value: float) -> float | str:
    """Return `value` as JSON can hold it."""
    return value if math.isfinite(value) else json.dumps(value)


def json_numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """Return the values as JSON can hold them."""
    return {name: json_number(float(value)) for name, value in values.items()}


def numbers(values: Mapping[str, float | str]) -> dict[str, float]:
    """Return what `json_numbers` wrote, as numbers."""
    return {name: float(v) if isinstance(v, str) else v for name, v in values.items()}


def json_line(record: Mapping[str, Any]) -> str:
    """Return `record`, whose numbers must be finite (see `json_number`), as one line of JSON."""
    return _ENCODER.encode(record) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the whole lines of a `metrics.jsonl`; [] without a file. Raises `CorruptError`."""
    return [numbers(row) for _, row in _rows(path)] if path.exists() else []


def logged_values(path: Path, step: int) -> dict[str, float]:
    """Return the file's last line of a step, without `step`; empty if there is none."""
    rows = [row for row in read_metrics(path) if row["step"] == step]
    return {name: value for name, value in rows[-1].items() if name != "step"} if rows else {}


def _rows(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    with open_regular(path) as file:
        lines = filter(bytes.strip, file.read().split(b"\n")[:-1])
    return [(line, parse_metrics(line, path)) for line in lines]


def parse_metrics(line: bytes, path: Path) -> dict[str, Any]:
    """Return a line's object, whose step is an integer. Raises `CorruptError`, which names the file."""
    with refusing(
        f"{path} has a line that is not a step's metrics: {line[:80]!r}",
        CorruptError,
        want='a JSON object with "step"',
        do="remove the line, or move the file away",
    ):
        row = json.loads(line)
        return {**row, "step": int(row["step"])}
