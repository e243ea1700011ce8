"""Bytes that torch's CPU allocator has given out, for `bench.planning`.

torch's profiler sees the allocations and frees of profiled threads only. gloo's threads are profiled
only while they run a collective: memory that they free afterwards would count as held for ever. With a flag, the allocator
itself sums what it has given out, whichever thread frees it, and reports the sum with every event. This module reads that sum.
Left out: memory that other libraries take from the system, such as oneDNN's generated kernels.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_SWITCH = "FLAGS_caffe2_report_cpu_memory_usage"
"""torch's own flag, a C++ variable of its core library (c10/core/CPUAllocator.cpp)."""

_LITTLE = 4
"""Bytes that every phase allocates, so that the sum is reported at least once."""


def switch() -> ctypes.c_bool:
    """Return this process's flag, which makes torch's allocator report what it has given out."""
    library = next((Path(torch.__file__).parent / "lib").glob("*c10.*"))
    return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _SWITCH)


class Meter:
    """The most bytes allocated in each phase, beyond those at the start. Turns the switch on for good."""

    def __init__(self) -> None:
        switch().value = True
        self.peaks: dict[str, list[int]] = {}
        gc.collect()
        self._before = 0
        with self.phase("nothing"):
            pass
        self._before = self.peaks.pop("nothing")[0] - _LITTLE

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        kinds = [ProfilerActivity.CPU]
        with profile(activities=kinds, profile_memory=True, acc_events=True) as recorded:
            torch.empty(_LITTLE, dtype=torch.uint8)
            yield
        assert recorded.profiler is not None
        tree = recorded.profiler.kineto_results.experimental_event_tree()
        self.peaks.setdefault(name, []).append(max(_totals(tree)) - self._before)

    def add(self, name: str, size: int) -> None:
        """Add bytes from outside the allocator to the last measurement of a phase."""
        self.peaks[name][-1] += size


def _totals(events: list[Any]) -> Iterator[int]:
    """Yield the sum of bytes given out after each event of memory."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            yield int(event.extra_fields.total_allocated)
