"""Snapshots of an accelerator's allocator: what it gave out, and which lines asked for it.

torch has functions for this on CUDA and XPU, none on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_EVENTS = 100_000
# Only the newest events are kept; one takes a few KB of host memory.


@contextmanager
def recording_allocations(device: torch.device) -> Iterator[None]:
    """Record allocations and frees, with their Python stacks, inside the block.

    Costs about 2 µs an allocation (torch's figure) and up to some hundred MB of host memory. Records
    nothing where the backend cannot.
    """
    record = getattr(_memory_of(device), "_record_memory_history", None)
    if record is None:
        yield
        return
    record("all", context="alloc", stacks="python", max_entries=_EVENTS)
    try:
        yield
    finally:
        record(None)


def can_write_snapshot(device: torch.device) -> bool:
    """Tell whether the device's backend can write a snapshot."""
    return hasattr(_memory_of(device), "_dump_snapshot")


def write_snapshot(device: torch.device, path: Path) -> None:
    """Write a snapshot for https://pytorch.org/memory_viz. Raises `OSError`."""
    _memory_of(device)._dump_snapshot(str(path))


def _memory_of(device: torch.device) -> Any:
    return getattr(torch.get_device_module(device), "memory", None)
