"""How far the planner has been from what runs measured: a table that `bench.planning` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.schema import RunConfig
from burnish.plan.activations import Arithmetic
from burnish.plan.megatron import MegatronNeeds
from burnish.plan.megatron_model import MegatronModel
from burnish.plan.memory import Needs
from burnish.plan.model import Model
from burnish.plan.shape import PlannedModel
from burnish.plan.share import PlannedLayout
from burnish.plan.workload import Command, Workload

TABLE = Path(__file__).with_name("accuracy.json")
"""The committed table."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One phase of one run."""

    case: str
    """Which run."""
    phase: str
    """Which phase."""
    planned: int
    """Bytes that the planner says."""
    measured: int
    """Bytes that were allocated."""
    exact_cache: bool = False
    """Whether they were on a CPU without matrix units, where the completions of a prompt share it, in fp32."""

    @property
    def error(self) -> float:
        """Planned over measured, less 1."""
        return self.planned / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measured_table() -> list[Measured]:
    """The committed table."""
    return [Measured(**row) for row in json.loads(TABLE.read_text())]


def planned(
    settings: Mapping[str, Any],
    command: Command,
    processes: int,
    *,
    cpu: bool = True,
    exact_cache: bool = False,
) -> dict[str, float]:
    """Bytes by phase on CPUs or accelerators, for a configuration whose `model.fresh` is a mapping; without what is away, which no allocator of torch's gives out.

    `exact_cache` as in `Arithmetic`: it is for whoever plans to say which CPUs are meant.
    """
    config = RunConfig.model_validate(settings)
    shape = PlannedModel.of(config.model.fresh if isinstance(config.model.fresh, dict) else {})
    width = 2 if config.engine.precision == "bf16" else 4
    layout = PlannedLayout.of(config.engine, processes)
    lora = config.model.adapter
    arithmetic = Arithmetic(width, cpu, layout.sequence, layout.tensor, lora, exact_cache)
    work = Workload.of(config, command)
    needs = (
        MegatronNeeds(MegatronModel(shape, arithmetic), config, work, layout)
        if config.engine.kind == "megatron"
        else Needs(Model(shape, arithmetic), config, work, layout)
    )
    phases = needs.phases(config.engine.activation_checkpointing).items()
    return {phase: sum(parts.values()) - parts.get("host", 0.0) for phase, parts in phases}
