"""What an accelerator's allocator has given out, and which lines of the program asked for it.

torch records and writes both, by functions that each backend has for itself: CUDA and XPU do, a CPU
does not. Left out: how much there is (`burnish.distributed.device`), and when to look.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_EVENTS = 100_000
# The newest so many are kept; one is a few KB of host memory.


@contextmanager
def recording_allocations(device: torch.device) -> Iterator[None]:
    """Inside the block the device's allocator remembers who asked for what it has given out, and its newest allocations and frees.

    That takes about 2 µs an allocation (torch's own figure) and up to some hundred MB of host memory. Where
    the backend cannot, nothing is recorded.
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
    """Whether the device's backend has one."""
    return hasattr(_memory_of(device), "_dump_snapshot")


def write_snapshot(device: torch.device, path: Path) -> None:
    """Write what the allocator has given out, with what was recorded, for https://pytorch.org/memory_viz. Raises `OSError`."""
    _memory_of(device)._dump_snapshot(str(path))


def _memory_of(device: torch.device) -> Any:
    """The module of a backend's memory; None where it has none."""
    return getattr(torch.get_device_module(device), "memory", None)
