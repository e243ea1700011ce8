"""Profile chosen steps: each rank's phases as a trace for Perfetto or chrome://tracing, torch's profiler, NVTX ranges."""

from __future__ import annotations

import gzip
import json
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from burnish.tracking.rundir import write_atomically
from burnish.tracking.spans import Spans

log = logging.getLogger("burnish")


@contextmanager
def profiling(
    directory: Path, rank: int, spans: Spans, steps: Sequence[int], *, with_torch: bool
) -> Iterator[None]:
    """Write `step-N.rank-R.json.gz` for each of `steps` inside the block, and if `with_torch` `….torch.json.gz`."""
    profile = _Profile(directory, rank, spans, frozenset(steps), with_torch)
    around = [*spans.around]
    ended = [*spans.ended]
    spans.around.append(profile.within)
    if torch.version.cuda and torch.cuda.is_available():  # AMD's builds have no NVTX
        spans.around.append(torch.cuda.nvtx.range)
    spans.ended.append(profile.note)
    try:
        yield
    finally:
        spans.around[:], spans.ended[:] = around, ended
        profile.turn(None)


class _Profile:
    def __init__(
        self, directory: Path, rank: int, spans: Spans, steps: frozenset[int], with_torch: bool
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._spans = spans
        self._steps = steps
        self._with_torch = with_torch
        self._step: int | None = None
        self._events: list[dict[str, Any]] = []
        self._offset = 0.0
        self._torch: torch.profiler.profile | None = None

    def within(self, path: str) -> AbstractContextManager[object]:
        if self._spans.step != self._step:
            self.turn(self._spans.step)
        return nullcontext() if self._torch is None else torch.profiler.record_function(path)

    def note(self, path: str, start: float, seconds: float) -> None:
        if self._step in self._steps:
            place = {"pid": self._rank, "tid": 0, "args": {"path": path}}
            begin = (start + self._offset) * 1e6
            what = {"name": path.rpartition("/")[2], "cat": "phase", "ph": "X"}
            self._events.append(what | {"ts": begin, "dur": seconds * 1e6} | place)

    def turn(self, step: int | None) -> None:
        path = self._directory / f"step-{self._step or 0:08d}.rank-{self._rank}"
        try:
            if self._torch is not None:
                self._torch.stop()
                path.parent.mkdir(parents=True, exist_ok=True)
                self._torch.export_chrome_trace(f"{path}.torch.json.gz")
            if self._events:
                named = {"name": "process_name", "ph": "M", "pid": self._rank}
                events = [named | {"args": {"name": f"rank {self._rank}"}}, *self._events]
                text = json.dumps({"traceEvents": events})
                write_atomically(Path(f"{path}.json.gz"), gzip.compress(text.encode(), mtime=0))
        except OSError as error:
            log.warning("%s is not written: %s", path, error)
        self._step = step
        self._events = []
        self._torch = None
        # Each rank has its own clock, so traces use the time of day.
        self._offset = time.time() - self._spans.now()
        if step in self._steps and self._with_torch:
            kinds = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            self._torch = torch.profiler.profile(activities=kinds)
            with warnings.catch_warnings():  # torch 2.11 warns of each profile
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")
                self._torch.start()
