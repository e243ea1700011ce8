"""How a run's processes are arranged, and how many elements of a model's weights one of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from burnish.config.schema import EngineConfig, LoraConfig
from burnish.plan.shape import Layer, PlannedModel, Weight


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """How the processes of a run are arranged."""

    replicas: int
    """Copies of the model."""
    shards: int
    """Processes that one copy is cut among."""
    sequence: int = 1
    """Processes that share the tokens of a micro-batch."""
    tensor: int = 1
    """Processes that share the matrices of each layer."""
    pipeline: int = 1
    """Groups of processes that share the layers of the model."""

    @classmethod
    def of(cls, engine: EngineConfig, processes: int) -> PlannedLayout:
        """So many processes, as the settings arrange them."""
        tensor, pipeline = engine.tensor_parallel, engine.pipeline_parallel
        shards = processes // (engine.replicas * tensor * pipeline)
        return cls(engine.replicas, shards, engine.sequence_parallel, tensor, pipeline)

    @property
    def world(self) -> int:
        """All processes."""
        return self.replicas * self.shards * self.tensor * self.pipeline

    @property
    def token_ranks(self) -> int:
        """Processes among which the tokens of a step are divided."""
        return self.replicas * self.shards


class Share:
    """What the process that holds most has of a model and its adapter, in elements."""

    def __init__(
        self, shape: PlannedModel, layout: PlannedLayout, lora: LoraConfig | None = None
    ) -> None:
        """`lora`: the adapter that is trained in the model's place."""
        self.shape, self.layout, self.lora = shape, layout, lora

    def held(self, weights: Iterable[Weight]) -> int:
        """Of these."""
        return sum(weight.held(self.layout.shards, self.layout.tensor) for weight in weights)

    def whole(self, weights: Iterable[Weight]) -> int:
        """Of these when gathered, rows filled up to a multiple of the shards."""
        return self.held(weights) * self.layout.shards

    @cached_property
    def layers(self) -> int:
        """Of all the model's layers."""
        return sum(self.held(layer.weights) * n for layer, n in self.shape.layers)

    @cached_property
    def all(self) -> int:
        """Of the model."""
        return self.layers + self.held(self.shape.root)

    @cached_property
    def root(self) -> int:
        """Of what is outside the layers, gathered."""
        return self.whole(self.shape.root)

    @property
    def gathered(self) -> int:
        """Of the model and its adapter, gathered."""
        return self.root + self.gathered_layers

    @cached_property
    def gathered_layers(self) -> int:
        """Of all layers and their adapters, gathered."""
        return sum(self._gathered(layer) * n for layer, n in self.shape.layers)

    def _gathered(self, layer: Layer) -> int:
        """Of a layer and its adapter, gathered."""
        return self.whole(layer.weights) + (
            0 if self.lora is None else self.whole(layer.adapter(self.lora))
        )

    @cached_property
    def matrices(self) -> int:
        """Of the layers' matrices."""
        return sum(
            self.held(weight for weight in layer.weights if weight.columns > 1) * n
            for layer, n in self.shape.layers
        )

    @cached_property
    def largest_layer(self) -> Layer:
        """The layer with most elements."""
        return max((layer for layer, _ in self.shape.layers), key=lambda each: each.elements)

    @cached_property
    def largest_gathered(self) -> int:
        """Of that layer and its adapter, gathered."""
        return self._gathered(self.largest_layer)

    def trained(self, layer: Layer) -> int:
        """Of what is trained of a layer."""
        return self.held(layer.trained(self.lora))

    @cached_property
    def trained_layers(self) -> int:
        """Of what is trained of all layers."""
        return sum(self.trained(layer) * n for layer, n in self.shape.layers)

    @property
    def trained_root(self) -> int:
        """Of what is trained outside the layers, gathered."""
        return self.root if self.lora is None else 0

    @cached_property
    def trained_all(self) -> int:
        """Of what is trained."""
        return self.trained_layers + self.trained_root // self.layout.shards

    @property
    def largest_trained(self) -> int:
        """Of what is trained of the largest layer, gathered."""
        return self.trained(self.largest_layer) * self.layout.shards

    @cached_property
    def largest_weight(self) -> int:
        """Of the weight that it holds most of, of those that are trained."""
        weights = [w for layer, _ in self.shape.layers for w in layer.trained(self.lora)]
        weights += self.shape.root if self.lora is None else ()
        return max(self.held([weight]) for weight in weights)
