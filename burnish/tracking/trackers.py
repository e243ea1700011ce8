"""Record each step's numbers in trackers; `Observers` feed them, the rollout files and the report.

`metrics.jsonl` is the record of a run: one JSON object a step. NaN and infinities are the strings
"NaN", "Infinity" and "-Infinity", as in protobuf's JSON; `float()` reads them. 10,000 steps of 40
numbers are about 10 MB. Only the main rank has observers; their numbers are reduced over ranks.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from burnish.config.schema import TrackingConfig
from burnish.errors import CorruptError
from burnish.functions import load_function
from burnish.tracking.rundir import RunDirectory, discard_leftovers, write_atomically

_REPORT_SECONDS, _REPORT_SHARE = 60.0, 0.02
# Least time between reports, and most of the time that they may take.


class Tracker(Protocol):
    """Something that takes the numbers of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's numbers by name (`actor/pg_loss`), NaN and infinity included.

        Called once per step, in ascending order, never after `close`. Must only read `values`, and
        survive a kill right after the call. Raises `OSError` if writing fails.
        """

    def sync(self) -> None:
        """Make taken numbers survive a power loss, if others depend on them. Raises `OSError`."""

    def close(self) -> None:
        """Write out held numbers and free resources. A second call does nothing."""


class Observers:
    """A run's trackers, rollout files and report, imported as its settings ask for them."""

    def __init__(
        self,
        directory: RunDirectory,
        settings: TrackingConfig,
        *,
        step: int,
        total_steps: int,
        is_logged: bool,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Open them for a run that goes on after `step` (0: new); remove later steps' data.

        `is_logged` says whether the line of `step` is already written. `decode` gives the text of
        tokens for `tracking.rollout_tokens`.
        """
        self._directory, self._settings, self._total_steps = directory, settings, total_steps
        directory.write_status(total_steps, "running")
        discard_leftovers(directory.root)
        discard_leftovers(directory.rollouts)
        self._rollouts = import_module("burnish.tracking.rollouts")
        self._rollouts.discard_rollouts_after(directory.rollouts, step)
        texts = decode and partial(self._rollouts.texts_of_tokens, decode=decode)
        self._token_texts = texts if settings.rollout_tokens else None
        console = import_module("burnish.tracking.console").ConsoleTracker
        resumed = (step if is_logged else step - 1) if step else None
        self._trackers: list[Tracker] = [
            console(total_steps=total_steps, every=settings.console_every),
            JsonlTracker(directory.metrics, resume_step=resumed),
        ]
        if settings.tensorboard:
            self._trackers.append(TensorBoardTracker(directory.tensorboard, resume_step=resumed))
        for name in settings.trackers:
            self._trackers.append(load_function(name, "tracking.trackers")(directory.root))
        self._next_report = time.monotonic() + _REPORT_SECONDS

    def rollouts_scored(
        self,
        step: int,
        rollouts: Sequence[Any],
        advantages: Sequence[float] | None,
        by_token: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Write a step's rollouts if due, as those of the first and last step are.

        Without `advantages`, they are a validation's. `by_token` has arrays by rollout.
        """
        every = self._settings.rollouts_every
        if every and (advantages is None or step % every == 0 or step in (1, self._total_steps)):
            directory = self._directory.rollouts
            self._rollouts.write_rollouts(
                directory, step, rollouts, advantages, self._token_texts, by_token
            )
            self._rollouts.thin_rollouts(directory, int(self._settings.rollouts_keep_gb * 1e9))

    def step_finished(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's line, in order to every tracker; write the report once a minute."""
        for tracker in self._trackers:
            tracker.log(step, values)
        if time.monotonic() >= self._next_report:
            self.report("running")

    def report(self, state: str) -> None:
        """Write the report of a run that is `running`, `finished`, `stopped` or `failed`, and note how it ended."""
        if state != "running":
            self._directory.write_status(self._total_steps, state)
        if self._settings.report:
            begun = time.monotonic()
            write_report = import_module("burnish.tracking.report").write_report
            write_report(self._directory.root, state)
            took = time.monotonic() - begun
            self._next_report = begun + max(_REPORT_SECONDS, took / _REPORT_SHARE)

    def sync(self) -> None:
        """Make each tracker's record survive a power loss."""
        for tracker in self._trackers:
            tracker.sync()

    def close(self) -> None:
        """Close every tracker, the last first, also if one of them raises."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


class JsonlTracker:
    """Append to `path`, flushed after every step.

    Resuming from step N first cuts later and half-written lines, atomically. So an interrupted
    run's file becomes that of an uninterrupted one. N = None begins an empty file.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        write_atomically(path, _kept(path, resume_step))
        # Unbuffered: what could not be written is not tried again on closing.
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


class TensorBoardTracker:
    """Write scalars to TensorBoard's event files under `directory`.

    Resuming from step N tells TensorBoard to forget later steps of earlier files; N = None forgets
    all.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge)
        self._closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write every value as a scalar of its name."""
        if self._closed:
            raise ValueError("log after close")
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def sync(self) -> None:
        """Do nothing: no run depends on these files."""

    def close(self) -> None:
        """Close the event file."""
        self._closed = True
        self._writer.close()


def json_number(value: float) -> float | str:
    """Return `value` as JSON can hold it: itself if finite, else "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """Return the values as JSON can hold them."""
    return {name: json_number(float(value)) for name, value in values.items()}


def numbers(values: Mapping[str, float | str]) -> dict[str, float]:
    """Return what `json_numbers` wrote, as numbers."""
    return {name: float(v) if isinstance(v, str) else v for name, v in values.items()}


def json_line(record: Mapping[str, Any]) -> str:
    """Return `record`, whose numbers must be finite (see `json_number`), as one line of JSON."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the steps of a `metrics.jsonl`, each with `step`, in order; [] without a file.

    Leaves out a last line without newline: it is still being written. Raises `CorruptError` for any
    other broken line.
    """
    if not path.exists():
        return []
    return [numbers(row) for _, row in _rows(path)]


def logged_values(path: Path, step: int) -> dict[str, float]:
    """Return the file's last line of a step, without `step`; empty if there is none."""
    rows = [row for row in read_metrics(path) if row["step"] == step]
    return {name: value for name, value in rows[-1].items() if name != "step"} if rows else {}


def _kept(path: Path, resume_step: int | None) -> bytes:
    """Return the lines up to `resume_step`, byte for byte."""
    if resume_step is None or not path.exists():
        return b""
    return b"".join(line + b"\n" for line, row in _rows(path) if row["step"] <= resume_step)


def _rows(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return whole lines and their objects. Raises `CorruptError` for a line without metrics."""
    rows = []
    for line in filter(bytes.strip, path.read_bytes().split(b"\n")[:-1]):
        try:
            row = json.loads(line)
            rows.append((line, {**row, "step": int(row["step"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{path} has a line that is not a step's metrics",
                have=line[:80].decode("utf-8", "replace"),
                want='a JSON object with "step"',
                do="remove the line, or move the file away",
            ) from error
    return rows
