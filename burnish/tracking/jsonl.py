"""`metrics.jsonl`: one JSON object per step, the record of a run.

NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON; `float()` reads them. 10,000 steps of
40 numbers are about 10 MB.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.errors import CorruptError
from burnish.tracking.atomic import write_atomically


def json_number(value: float) -> float | str:
    """`value` as JSON can hold it: itself when finite, else "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """The values as JSON can hold them."""
    return {name: json_number(value) for name, value in values.items()}


def json_line(record: Mapping[str, Any]) -> str:
    """Return `record`, whose numbers must be finite (see `json_number`), as one line of JSON."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"


class JsonlTracker:
    """Appends to `path`, flushed after every step.

    Resuming from step N first cuts later lines, and a half-written one, atomically; so an interrupted run's file becomes that of an
    uninterrupted one. N = None begins an empty file.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        write_atomically(path, _kept(path, resume_step))
        # Unbuffered: what could not be written is not tried again on closing.
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the step's object: `step` first, then the values in the order given."""
        numbers = {name: json_number(float(value)) for name, value in values.items()}
        line = json_line({"step": step, **numbers}).encode()
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


def _kept(path: Path, resume_step: int | None) -> bytes:
    """The lines of steps up to `resume_step`, byte for byte."""
    if resume_step is None or not path.exists():
        return b""
    lines = path.read_bytes().split(b"\n")[:-1]
    kept = [line for line in lines if line.strip() and _step(path, line) <= resume_step]
    return b"".join(line + b"\n" for line in kept)


def _step(path: Path, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, line) from error


def _corrupt(path: Path, line: bytes) -> CorruptError:
    return CorruptError(
        f"{path} has a line that is not a step's metrics",
        have=line[:80].decode("utf-8", "replace"),
        want='a JSON object with "step"',
        do="remove the line, or move the file away",
    )


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the steps of a `metrics.jsonl`, each with `step`, in the file's order; [] without a file.

    A last line without its newline is still being written, and left out. Raises `CorruptError` for any other broken line.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        if line.strip():
            row = {"step": _step(path, line), **json.loads(line)}
            rows.append({name: number(value) for name, value in row.items()})
    return rows


def logged_values(path: Path, step: int) -> dict[str, float]:
    """What the file says of a step, without `step`; empty where it says nothing of it."""
    rows = [row for row in read_metrics(path) if row["step"] == step]
    return {name: value for name, value in rows[-1].items() if name != "step"} if rows else {}


def number(value: float | str) -> float:
    """What `json_number` wrote, as a number."""
    return float(value) if isinstance(value, str) else value


def numbers(values: Mapping[str, float | str]) -> dict[str, float]:
    """What `json_numbers` wrote, as numbers."""
    return {name: number(value) for name, value in values.items()}
