"""Bytes that torch's CPU allocator has given out, for `bench.planning`.

What torch tells its profiler of memory is what threads that are profiled allocate and free. gloo's threads are profiled
only while they run a collective: what they let go of afterwards would count as held for ever. The allocator itself knows
better: told to, it keeps the sum of what it gave out, whoever frees it, and says it with every event. That sum is what is read here.
Left out: what other libraries take for themselves (kernels that oneDNN writes, buffers of the system).
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
"""Bytes that every phase allocates, so that the sum is said at least once."""


def switch() -> ctypes.c_bool:
    """Whether torch's allocator says what it gives out: the flag of this process, to be set."""
    library = next((Path(torch.__file__).parent / "lib").glob("*c10.*"))
    return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _SWITCH)


class Meter:
    """Bytes that are allocated, at their highest in every phase, beside what there was before. Turns the switch on for good."""

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
        """Count bytes beside those of the allocator, of the last time that a phase was measured."""
        self.peaks[name][-1] += size


def _totals(events: list[Any]) -> Iterator[int]:
    """All that was given out, after every event of memory."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            yield int(event.extra_fields.total_allocated)
