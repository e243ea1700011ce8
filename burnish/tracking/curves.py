"""Read metrics.jsonl as it grows: a curve for each name."""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from burnish.errors import CorruptError
from burnish.files.storage import open_regular
from burnish.tracking.trackers import json_number, parse_metrics

_TAIL = 200  # last bytes read, by which a rewritten file is noticed


class Curve:
    """The values of one metric, by ascending step."""

    def __init__(self) -> None:
        self.steps = array("i")
        self.values = array("d")

    def at(self, step: int) -> float | None:
        """Return the finite value of a step."""
        values = self.values[:]  # another thread may read more meanwhile
        place = bisect_left(self.steps, step)
        is_there = place < len(values) and self.steps[place] == step
        return values[place] if is_there and math.isfinite(values[place]) else None

    def points(self, most: int, first: int, last: int) -> dict[str, list[Any]]:
        """Return last steps, means, lowest and highest values of at most `most` buckets, for JSON."""
        known = self.values[:]  # another thread may read more meanwhile
        steps = self.steps[: len(known)]
        start = bisect_left(steps, first)
        stop = bisect_right(steps, last)
        count = max(0, stop - start)
        buckets = min(count, most)
        ends = [start + count * number // buckets for number in range(buckets + 1)] if count else []
        columns: dict[str, list[Any]] = {"steps": [], "values": [], "low": [], "high": []}
        for begin, end in pairwise(ends):
            values = list(filter(math.isfinite, known[begin:end])) or [known[begin]]
            mean = math.fsum(values) / len(values) if len(values) > 1 else values[0]
            columns["steps"].append(steps[end - 1])
            for name, value in (("values", mean), ("low", min(values)), ("high", max(values))):
                columns[name].append(json_number(float(f"{value:.7g}")))
        return columns


class Curves:
    """The curves of a file. Threads may share it."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """Read the whole file, or its last bytes only."""
        self.path = path
        self._last_bytes = last_bytes
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.by_name: dict[str, Curve] = {}
        self.last_step = 0
        self.problem: CorruptError | None = None
        """The problem of a line that was skipped."""
        self.is_whole = True
        """Whether the file was read from its beginning."""
        self._place = 0
        self._tail = b""
        self._inode = 0

    def finite(self, name: str) -> list[float]:
        """Return the finite values of a metric; none if it is not there."""
        return [*filter(math.isfinite, self.by_name[name].values)] if name in self.by_name else []

    def refresh(self) -> Self:
        """Read new whole lines, or everything if the file was rewritten. Without a file there are no curves."""
        with self._lock:
            if not self.path.exists():
                self._forget()
                return self
            with open_regular(self.path) as file:
                state = os.fstat(file.fileno())
                file.seek(self._place - len(self._tail))
                if self._inode != state.st_ino or file.read(len(self._tail)) != self._tail:
                    self._forget()
                    self._inode = state.st_ino
                    self._place = max(0, state.st_size - (self._last_bytes or state.st_size))
                    file.seek(self._place)
                    if self._place:
                        self.is_whole = False
                        self._place += len(file.readline())
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            for line in filter(bytes.strip, whole.split(b"\n")):
                self._add(line)
            self._place += len(whole)
            self._tail = (self._tail + whole)[-_TAIL:]
        return self

    def whole(self) -> Self:
        """Refresh. Raises `CorruptError` for a broken line."""
        self.refresh()
        if self.problem is not None:
            raise self.problem
        return self

    def _add(self, line: bytes) -> None:
        try:
            row = parse_metrics(line, self.path)
        except CorruptError as error:
            self.problem = error
            return
        step = row.pop("step")
        if step <= self.last_step:  # a resumed run makes steps again
            for curve in self.by_name.values():
                end = bisect_left(curve.steps, step)
                del curve.steps[end:], curve.values[end:]
        self.last_step = step
        for name, value in row.items():
            curve = self.by_name.get(name) or Curve()
            try:
                number = float(value)
                curve.steps.append(step)
            except (ValueError, TypeError, OverflowError):  # not a number
                continue
            curve.values.append(number)
            self.by_name[name] = curve
