"""What is said when a device has no memory left: the setting that would have helped, by the planner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from burnish.config.schema import ModelConfig, RunConfig
from burnish.distributed.allocations import (
    can_write_snapshot,
    recording_allocations,
    write_snapshot,
)
from burnish.distributed.device import device_name, peak_memory, total_memory
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.models.loading import read_model_config
from burnish.plan.advice import advice
from burnish.plan.devices import Devices
from burnish.plan.layouts import Plan, Planner
from burnish.plan.shape import PlannedModel
from burnish.plan.workload import Workload
from burnish.tracking.peaks import Peaks

_CPU_SAYS = "can't allocate memory"
"""How torch's allocator on a CPU says it, in a plain RuntimeError."""

_PLANNED = {"advantages": "log-probs", "validate": "rollout"}
# What the planner calls parts of a step that are something else to a reader of the metrics.


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
    peaks: Peaks
    """Which part of a step was running."""

    @contextmanager
    def explained(self, directory: Path) -> Iterator[None]:
        """Raise `BurnishError` with what would have helped where the block runs out of memory.

        Where the device's backend can, a snapshot of its allocator is left in `directory`, for
        https://pytorch.org/memory_viz; with `tracking.allocations` it names the lines of the program.
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
        phase = self.peaks.current or "setting up"
        total, highest = total_memory(self.device) / 1e9, peak_memory(self.device) / 1e9
        helpful = "set batch.tokens_per_device lower"
        plan = self._plan(phase)
        if plan is not None:
            helpful = f"try {advice(plan, self.config)}; see burnish plan"
        return BurnishError(
            f"rank {self.layout.rank} ran out of memory in {phase}",
            have=f"{' '.join(str(error).split())[:200]}; {highest:.1f} GB in use at most",
            want=f"no more than the {total:.1f} GB of {device_name(self.device)}",
            do=helpful + snapshot,
        )

    def _plan(self, phase: str) -> Plan | None:
        """What the planner says of this run, of the phase if it has it; None for a model or an engine that it does not know or cannot read here."""
        name = "CPU" if self.device.type == "cpu" else device_name(self.device)
        devices = Devices(self.layout.world, name, total_memory(self.device), 1.0, 1.0, 1.0)
        try:
            shape, *judges = (
                PlannedModel.of(read_model_config(model).to_dict()) for model in self._models()
            )
            work = Workload.of(self.config, self.trainer)
            plan = Planner(shape, self.config, work, devices, judges).as_configured()
        except BurnishError:
            return None
        return plan.within(_PLANNED.get(phase, phase))

    def _models(self) -> Iterator[ModelConfig]:
        """The model, and those that judge."""
        yield self.config.model
        if self.trainer == "rl":
            yield from (ModelConfig(path=judge.path) for judge in self.config.reward.models)

    def _snapshot(self, directory: Path) -> str:
        """Leave a snapshot; what the message says of it."""
        if not can_write_snapshot(self.device):
            return ""
        path = directory / f"out-of-memory-rank{self.layout.rank}.pickle"
        try:
            write_snapshot(self.device, path)
        except OSError as failed:  # the lack of memory is what has to be told
            return f"; what was allocated could not be written: {failed}"
        lines = "" if self.config.tracking.allocations else " (for what: tracking.allocations=true)"
        return f"; what was allocated{lines} is in {path}"
