"""Log to TensorBoard's event files."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.tracking.rollouts import sample_table
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import Tracker

# Most rows of a table, and most characters of a cell.
_SAMPLES = 16
_CHARACTERS = 2000
_BUFFER = 1 << 20
"""Bytes; holds whole records while the disk is full."""


class TensorBoardTracker(Tracker):
    """Write scalars, and samples as texts, to TensorBoard's event files. Resuming hides later steps; with None, all."""

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
        place = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        path = RunDirectory(directory).tensorboard / f"events.out.tfevents.{place}"
        path.parent.mkdir(parents=True, exist_ok=True)
        # The writers of TensorBoard and torch have a thread, which prints a traceback if the disk is full.
        self._records = RecordWriter(path.open("xb", buffering=_BUFFER))
        purge = 0 if resume_step is None else resume_step + 1
        self._write(purge, file_version="brain.Event:2")
        self._write(purge, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int, **what: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **what)
        self._records.write(event.SerializeToString())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write every value as a scalar of its name, all in one record."""
        scalars = [self._summary.Value(tag=n, simple_value=float(v)) for n, v in values.items()]
        self._write(step, summary=self._summary(value=scalars))

    def log_rollouts(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the first samples as a table in Markdown."""
        from torch.utils.tensorboard.summary import text

        if table := sample_table(rows[:_SAMPLES]):
            lines = [list(table[0]), ["---"] * len(table[0])]
            lines += [[_cell(value) for value in row.values()] for row in table]
            markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            self._write(step, summary=text(f"rollouts/{kind}", markdown))  # type: ignore[no-untyped-call]

    def sync(self) -> None:
        """Write held records."""
        self._records.flush()

    def close(self) -> None:
        """Close the event file."""
        self._records.close()


def _cell(value: object) -> str:
    escaped = {ord(each): f"&#{ord(each)};" for each in "\\`*_[]|#~&<>"}
    return str(value)[:_CHARACTERS].translate(escaped).replace("\n", "<br>")
