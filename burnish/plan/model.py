"""A model as the planner sees it: its layers, and what each of them holds of a token."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Self

from burnish.plan.activations import Arithmetic, layer_passes
from burnish.plan.shape import Layer, PlannedModel
from burnish.plan.tape import Passes


class Model:
    """A model's layers and what they hold of a token, for one arithmetic; made once, then asked for every layout."""

    def __init__(self, shape: PlannedModel, arithmetic: Arithmetic) -> None:
        self.shape = shape
        self.arithmetic = arithmetic
        self.lora = arithmetic.lora
        self.bytes = arithmetic.bytes
        self.cpu = arithmetic.cpu
        self.exact_cache = arithmetic.exact_cache
        self.tensor = arithmetic.tensor
        self.layers: list[tuple[Layer, int, Passes]] = [
            (layer, count, layer_passes(shape.family, layer, arithmetic))
            for layer, count in shape.layers
        ]
        self.hidden = float(shape.hidden * arithmetic.bytes)

    @cached_property
    def cache_per_token(self) -> float:
        """Bytes of a token's keys and values in all layers."""
        return sum(2.0 * layer.key * self.bytes * n for layer, n, _ in self.layers)

    @cached_property
    def inference(self) -> float:
        """Bytes of a token in the layer that needs most while nothing is kept."""
        return max(passes.inference for _, _, passes in self.layers)

    @cached_property
    def critic(self) -> Self:
        """The same with a value head, of which all is trained."""
        shape = replace(self.shape, scores_values=True)
        return type(self)(shape, replace(self.arithmetic, lora=None))

    def kept(self, passes: Passes, checkpointing: str) -> float:
        """Bytes of a token that a layer keeps for its backward pass."""
        if checkpointing == "full":
            return self.hidden / self.tensor
        return passes.products if checkpointing == "selective" else passes.kept
