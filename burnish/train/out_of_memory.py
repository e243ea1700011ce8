"""Explain that a device has no memory left, and name settings that need less."""

from __future__ import annotations

import torch

from burnish.config.remedies import remedies
from burnish.distributed.device import (
    device_name,
    peak_memory,
    total_memory,
    write_snapshot,
)
from burnish.errors import BurnishError
from burnish.train.ownership import Session

_CPU_SAYS = "can't allocate memory"
"""How torch's allocator on a CPU says it, in a plain RuntimeError."""


def explained(error: RuntimeError, session: Session) -> BurnishError | None:
    """Return what to tell of `error`, with helpful settings; None if it is no lack of memory.

    If the backend can, leaves a snapshot of its allocator in the run's directory, for https://pytorch.org/memory_viz. With
    `tracking.allocations` it names lines of the program.
    """
    if not isinstance(error, torch.OutOfMemoryError) and _CPU_SAYS not in str(error):
        return None
    device, rank = session.device, session.layout.rank
    phase = session.spans.current or "setting up"
    total, highest = total_memory(device) / 1e9, peak_memory(device) / 1e9
    on_cpu = device.type == "cpu"
    settings = remedies(session.config, session.trainer, phase, on_cpu=on_cpu)
    helpful = f"try {', or '.join(settings[:3])}; burnish plan shows how much each part needs"
    return BurnishError(
        f"rank {rank} ran out of memory in {phase}",
        have=f"{' '.join(str(error).split())[:200]}; {highest:.1f} GB in use at most",
        want=f"no more than the {total:.1f} GB of {device_name(device)}",
        do=helpful + _snapshot(session),
    )


def _snapshot(session: Session) -> str:
    """Leave a snapshot, and return what the message says of it."""
    path = session.directory.root / f"out-of-memory-rank{session.layout.rank}.pickle"
    try:
        if not write_snapshot(session.device, path):
            return ""
    except OSError as failed:  # the lack of memory is what has to be told
        return f"; what was allocated could not be written: {failed}"
    lines = "" if session.config.tracking.allocations else " (for what: tracking.allocations=true)"
    return f"; what was allocated{lines} is in {path}"
