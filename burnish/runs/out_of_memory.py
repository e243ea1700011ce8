"""Explain that a device has no memory left, and name settings that need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burnish.config.out_of_memory_hints import remedies
from burnish.distributed.device import device_name, peak_memory, total_memory
from burnish.errors import BurnishError

if TYPE_CHECKING:
    from burnish.runs.session import Session

_CPU_SAYS = "can't allocate memory"
"""Text of the plain RuntimeError that torch's CPU allocator raises."""
_ALLOCATOR_EVENTS = 100_000
"""Most events that are kept, the newest ones; each takes a few KB of host memory."""


def explained(error: RuntimeError, session: Session) -> BurnishError | None:
    """Explain an out-of-memory error; return None for any other error.

    Writes a snapshot of the allocator for https://pytorch.org/memory_viz if the backend can. With `tracking.allocations` the
    snapshot names lines of code.
    """
    if not isinstance(error, torch.OutOfMemoryError) and _CPU_SAYS not in str(error):
        return None
    device = session.device
    rank = session.layout.rank
    phase = session.spans.current or "setting up"
    total = total_memory(device) / 1e9
    highest = peak_memory(device) / 1e9
    on_cpu = device.type == "cpu"
    method = session.method
    config = session.config
    settings = remedies(
        config,
        method.generates,
        phase,
        beside=[*method.frozen(config)],
        on_cpu=on_cpu,
        longest=method.longest(config),
    )
    helpful = f"try {', or '.join(settings[:3])}; burnish plan shows how much each part needs"
    return BurnishError(
        f"rank {rank} ran out of memory in {phase}",
        have=f"{' '.join(str(error).split())[:200]}; {highest:.1f} GB in use at most",
        want=f"no more than the {total:.1f} GB of {device_name(device)}",
        do=helpful + _snapshot(session),
    )


def _snapshot(session: Session) -> str:
    path = session.directory.root / f"out-of-memory-rank{session.layout.rank}.pickle"
    try:
        if not write_snapshot(session.device, path):
            return ""
    except OSError as failed:  # the user still has to hear of the lack of memory
        return f"; the snapshot of allocations could not be written: {failed}"
    more = "" if session.config.tracking.allocations else " (tracking.allocations=true adds lines)"
    return f"; a snapshot of allocations{more} is in {path}"


@contextmanager
def recording_allocations(device: torch.device) -> Iterator[None]:
    """Record allocations and their Python stacks inside the block, if the backend can.

    Costs about 2 µs an allocation (torch's figure) and up to some hundred MB of host memory.
    """
    record = getattr(_memory_of(device), "_record_memory_history", None)
    if record is None:
        yield
        return
    record("all", context="alloc", stacks="python", max_entries=_ALLOCATOR_EVENTS)
    try:
        yield
    finally:
        record(None)


def write_snapshot(device: torch.device, path: Path) -> bool:
    """Write a snapshot; return False if the backend has none. Raises `OSError`."""
    dump = getattr(_memory_of(device), "_dump_snapshot", None)
    if dump is not None:
        dump(str(path))
    return dump is not None


def _memory_of(device: torch.device) -> Any:
    return getattr(torch.get_device_module(device), "memory", None)
