"""How the planner counts a model's weights: rows, columns, and who divides them.

Sizes come from `burnish.families`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from burnish.config.schema import LoraConfig
from burnish.families import Family, LayerShape, ModelShape
from burnish.models.flops import AttentionCost, ModelFlops
from burnish.models.lora.adapter_config import are_parameters, require_targets
from burnish.plan.pipelines import Pipelines

BLOCK = 256
"""Neighbours in a row that share a scale where moments have 8 bits."""
_CUT_BY_COLUMNS = ("o_proj", "down_proj")
"""Ends of the names of those linear layers that tensor parallelism cuts by columns."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, as it is cut: along its first dim."""

    rows: int
    """Size of the first dim."""
    columns: int = 1
    """Elements per row."""
    shared: bool = False
    """Whether tensor parallelism divides it."""
    linear: str = ""
    """What an adapter knows it by: the last part of the name of its linear layer, the last two of an expert parameter's own; else nothing."""
    width: int = 0
    """Size of its last dim; 0: `columns`."""
    joined: int = 1
    """Experts that it is the matrices of."""

    @property
    def elements(self) -> int:
        """All of it."""
        return self.rows * self.columns

    def held(self, shards: int, tensor: int = 1) -> int:
        """Elements on the rank that holds most of what `tensor` ranks share, its rows cut into `shards` as torch.chunk does."""
        parts = tensor if self.shared else 1
        return -(-self.rows // shards) * self.columns // parts

    def scales(self, shards: int, tensor: int = 1) -> int:
        """Blocks of 256 neighbours of a row on that rank, the last of a row being shorter (`burnish.engines.optim.adamw8bit`)."""
        parts, width = tensor if self.shared else 1, self.width or self.columns
        blocks = self.columns // width * -(-width // BLOCK)
        return -(-self.rows // shards) * blocks // parts

    def factors(self, rank: int) -> tuple[Weight, Weight]:
        """A and B of an adapter of this rank beside it; tensor parallelism divides B where it cuts rows of this weight, A where columns."""
        width, inner = self.width or self.columns, rank * self.joined
        by_columns = self.linear.endswith(_CUT_BY_COLUMNS)
        rows = self.elements // (self.joined * width)
        return (
            Weight(inner, width, self.shared and by_columns),
            Weight(rows, inner, self.shared and not by_columns),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    hidden: int
    """Width of the hidden state."""
    query: int
    """Width of all query heads."""
    key: int
    """Width of all key heads, and of all value heads."""
    heads: int
    """Query heads."""
    key_heads: int
    """Key heads."""
    intermediate: int
    """Width of the MLP, or of one expert."""
    experts: int
    """Experts; 0: a plain MLP."""
    chosen: int
    """Experts per token."""
    window: int | None
    """Keys that a query sees; None: all before it."""
    weights: tuple[Weight, ...]
    """Its parameters."""

    @property
    def elements(self) -> int:
        """Of all its parameters."""
        return sum(weight.elements for weight in self.weights)

    def adapter(self, lora: LoraConfig) -> Iterator[Weight]:
        """An adapter: two narrow matrices beside that of each linear layer that it is for."""
        for weight in self.weights:
            if adapts(lora, weight.linear):
                yield from weight.factors(lora.rank)

    def trained(self, lora: LoraConfig | None) -> tuple[Weight, ...]:
        """Its parameters, or those of its adapter in their place."""
        return self.weights if lora is None else tuple(self.adapter(lora))


def adapts(lora: LoraConfig | None, linear: str) -> bool:
    """Whether an adapter is for linear layers of this name, or for experts' parameters, which it has only where they are named."""
    if lora is None or not linear:
        return False
    return linear in lora.targets if lora.targets else not are_parameters(linear)


@dataclass(frozen=True)
class PlannedModel:
    """A causal language model, or one with a value head, as the planner counts it."""

    family: Family
    """What kind."""
    hidden: int
    """Width of the hidden state."""
    vocabulary: int
    """Rows of the embedding."""
    tied: bool
    """Whether the output layer is the embedding."""
    layers: tuple[tuple[Layer, int], ...]
    """Each kind of layer and how many there are of it."""
    order: tuple[int, ...]
    """Of which kind each layer is, as they follow each other: its place in `layers`."""
    scores_values: bool = False
    """Whether a number stands in the place of the output layer."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PlannedModel:
        """From the content of a config.json. Raises `UsageError` for a family or fields that are not known."""
        shape = ModelShape.of(config)
        places = {layer: place for place, layer in enumerate(shape.counts)}
        return cls(
            shape.family,
            shape.hidden,
            shape.vocabulary,
            shape.tied,
            tuple((_layer(shape.hidden, each), count) for each, count in shape.counts.items()),
            tuple(places[layer] for layer in shape.layers),
        )

    @cached_property
    def depth(self) -> int:
        """How many layers."""
        return sum(count for _, count in self.layers)

    @cached_property
    def pipelines(self) -> Pipelines:
        """How stages can share its layers."""
        return Pipelines(self.order)

    @cached_property
    def root(self) -> tuple[Weight, ...]:
        """The parameters outside the layers: embedding, last norm, output layer."""
        table, norm = Weight(self.vocabulary, self.hidden, True), Weight(self.hidden)
        return (table, norm) if self.tied or self.scores_values else (table, norm, table)

    @property
    def outputs(self) -> int:
        """Numbers per token."""
        return 1 if self.scores_values else self.vocabulary

    @cached_property
    def elements(self) -> int:
        """Of all parameters."""
        layers = sum(layer.elements * count for layer, count in self.layers)
        return layers + sum(weight.elements for weight in self.root)

    def adapter(self, lora: LoraConfig | None) -> int:
        """Elements of an adapter; 0 where there is none. Raises `IncompatibleError` for one of layers that are not there."""
        if lora is None:
            return 0
        every = (weight.linear for layer, _ in self.layers for weight in layer.weights)
        require_targets(lora.targets, sorted({linear for linear in every if linear}))
        return sum(w.elements * n for layer, n in self.layers for w in layer.adapter(lora))

    def beside(self, lora: LoraConfig | None) -> int:
        """Elements of an adapter that generators hold beside the model; 0 where it is merged in."""
        return self.adapter(lora) if lora is not None and lora.publish == "adapter" else 0

    @cached_property
    def flops(self) -> ModelFlops:
        """What its sequences cost."""
        active = self.outputs * self.hidden + sum(
            _active(layer) * count for layer, count in self.layers
        )
        attention = tuple(
            AttentionCost(4 * layer.query, layer.window)
            for layer, count in self.layers
            for _ in range(count)
        )
        return ModelFlops(2.0 * active, attention, 2.0 * self.outputs * self.hidden)


def _layer(hidden: int, shape: LayerShape) -> Layer:
    return Layer(
        hidden,
        shape.query,
        shape.key,
        shape.heads,
        shape.key_heads,
        shape.intermediate,
        shape.experts,
        shape.experts_per_token,
        shape.window,
        tuple(_weight(name, sizes) for name, sizes in shape.parameters),
    )


def _weight(name: str, sizes: tuple[int, ...]) -> Weight:
    module, _, kind = name.rpartition(".")
    if len(sizes) == 3:
        experts, rows, width = sizes
        return Weight(experts, rows * width, True, f"experts.{kind}", width, experts)
    if module.endswith("_proj"):
        linear = module.rpartition(".")[2]
        if kind == "weight":
            return Weight(sizes[0], sizes[1], True, linear)
        return Weight(sizes[0], 1, linear not in _CUT_BY_COLUMNS)
    return Weight(sizes[0], sizes[1] if len(sizes) > 1 else 1)


def _active(layer: Layer) -> int:
    """Elements of the matrices that one token is multiplied with."""
    total = 0
    for weight in layer.weights:
        if weight.columns == 1:
            continue
        expert = layer.experts and weight.rows == layer.experts and weight.columns != layer.hidden
        total += weight.elements * layer.chosen // layer.experts if expert else weight.elements
    return total
