"""Frozen models for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.config.frozen_models import FrozenModel
from burnish.families import ModelShape
from burnish.plan.model import PlannedBeside


def beside(judges: Sequence[Mapping[str, Any]]) -> list[PlannedBeside]:
    """Return reward models with these values of config.json."""
    said = [
        FrozenModel("j", f"reward.models[{n}].path", "reward models", "scores", "rollout")
        for n in range(len(judges))
    ]
    shapes = [ModelShape.of(dict(each)) for each in judges]
    return [PlannedBeside.of(*each) for each in zip(said, shapes, strict=True)]
