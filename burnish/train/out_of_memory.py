"""Explain that a device has no memory left, and name settings that need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from burnish.config.remedies import remedies
from burnish.config.schema import RunConfig
from burnish.distributed.device import (
    device_name,
    peak_memory,
    recording_allocations,
    total_memory,
    write_snapshot,
)
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.tracking.spans import Spans

_CPU_SAYS = "can't allocate memory"
"""How torch's allocator on a CPU says it, in a plain RuntimeError."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Who ran out, and of what."""

    config: RunConfig
    """The run."""
    trainer: Literal["sft", "rl"]
    """Which kind."""
    layout: Layout
    """Where this process stands."""
    device: torch.device
    """What has no memory left."""
    spans: Spans
    """Which part of a step was running."""

    @contextmanager
    def explained(self, directory: Path) -> Iterator[None]:
        """Raise `BurnishError` with helpful settings if the block runs out of memory.

        If the backend can, leave a snapshot of its allocator in `directory`, for https://pytorch.org/memory_viz. With
        `tracking.allocations` it names lines of the program.
        """
        records = self.config.tracking.allocations
        with recording_allocations(self.device) if records else nullcontext():
            try:
                yield
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not isinstance(error, torch.OutOfMemoryError) and _CPU_SAYS not in str(error):
                    raise
                raise self._error(error, self._snapshot(directory)) from error

    def _error(self, error: Exception, snapshot: str) -> BurnishError:
        phase = self.spans.current or "setting up"
        total, highest = total_memory(self.device) / 1e9, peak_memory(self.device) / 1e9
        settings = remedies(self.config, self.trainer, phase, on_cpu=self.device.type == "cpu")
        helpful = f"try {', or '.join(settings[:3])}; burnish plan shows how much each part needs"
        return BurnishError(
            f"rank {self.layout.rank} ran out of memory in {phase}",
            have=f"{' '.join(str(error).split())[:200]}; {highest:.1f} GB in use at most",
            want=f"no more than the {total:.1f} GB of {device_name(self.device)}",
            do=helpful + snapshot,
        )

    def _snapshot(self, directory: Path) -> str:
        """Leave a snapshot; what the message says of it."""
        path = directory / f"out-of-memory-rank{self.layout.rank}.pickle"
        try:
            if not write_snapshot(self.device, path):
                return ""
        except OSError as failed:  # the lack of memory is what has to be told
            return f"; what was allocated could not be written: {failed}"
        lines = "" if self.config.tracking.allocations else " (for what: tracking.allocations=true)"
        return f"; what was allocated{lines} is in {path}"
