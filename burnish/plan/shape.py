"""The shape of a model, from the fields of its config.json.

Only what decides memory and work: the weight matrices of each kind of layer, and how wide its activations
are. Families are described by a few facts each (`FAMILIES`); their defaults are transformers'. Left out:
everything that is read off a built model (`burnish.models`), and families that are not in the table, which are
refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from burnish.config.schema import LoraConfig
from burnish.errors import UsageError
from burnish.models.flops import AttentionCost, ModelFlops
from burnish.models.lora.adapter_names import are_parameters, require_targets
from burnish.plan.pipelines import Pipelines

BLOCK = 256
"""Neighbours in a row that share a scale where moments have 8 bits."""
_CUT_BY_COLUMNS = ("o_proj", "down_proj")
"""Ends of the names of those linear layers that tensor parallelism cuts by columns."""
Norms = Literal["none", "head", "full"]
"""Whether queries and keys are normalized: not, each head by itself, or all heads together."""


@dataclass(frozen=True, slots=True)
class Family:
    """What config.json does not say."""

    fused: bool = True
    """Whether `burnish.models.kernels.fused` has its norms and attention."""
    norms_per_layer: int = 2
    """RMSNorms on the hidden state."""
    norms_first: bool = True
    """Whether attention and MLP begin with a norm."""
    query_norms: Norms = "none"
    """Norms of queries and keys."""
    biased: bool = False
    """Whether the projections to queries, keys and values have biases whatever config.json says."""
    key_heads: int | None = None
    """Key heads where config.json does not name them; None: as many as query heads."""
    head_dim: int | None = None
    """Width of a head where config.json does not say; None: hidden_size / num_attention_heads."""
    tied: bool = False
    """Whether the output layer is the embedding where config.json does not say."""
    windowed: bool = False
    """Whether `sliding_window` counts without `use_sliding_window`."""
    experts: bool = False
    """Whether it has experts."""
    tensor: bool = True
    """Whether tensor parallelism knows it (`burnish.engines.torch.tensor_parallel`)."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(windowed=True, key_heads=8),
    "mixtral": Family(windowed=True, experts=True, key_heads=8),
    "qwen2": Family(biased=True, key_heads=32),
    "qwen3": Family(query_norms="head", head_dim=128, key_heads=32),
    "qwen3_moe": Family(query_norms="head", experts=True, key_heads=4),
    "gemma3_text": Family(
        fused=False,
        norms_per_layer=4,
        query_norms="head",
        head_dim=256,
        tied=True,
        windowed=True,
        key_heads=4,
    ),
    "olmo2": Family(fused=False, norms_first=False, query_norms="full", tensor=False),
}
"""By `model_type`."""


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
class ModelShape:
    """A causal language model, or one with a value head."""

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
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the content of a config.json. Raises `UsageError` for a family or fields that are not known."""
        fields = dict(config) | dict(config.get("text_config") or {})
        kind = fields.get("model_type")
        if kind not in FAMILIES:
            raise UsageError(
                f"the planner does not know models of type {kind}",
                have=f"model_type: {kind}",
                want=f"one of {', '.join(FAMILIES)}",
                do="run a short training of it and read perf/max_memory_gb",
            )
        family, depth = FAMILIES[kind], _field(fields, "num_hidden_layers")
        every = [_layer(family, fields, index) for index in range(depth)]
        counts = Counter(every)
        places = {layer: place for place, layer in enumerate(counts)}
        return cls(
            family,
            _field(fields, "hidden_size"),
            _field(fields, "vocab_size"),
            bool(fields.get("tie_word_embeddings", family.tied)),
            tuple(counts.items()),
            tuple(places[layer] for layer in every),
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


def _field(fields: Mapping[str, Any], name: str, *others: str) -> int:
    """A whole number above 0 that has to be there, under one of its names."""
    for each in (name, *others):
        if isinstance(value := fields.get(each), int) and value > 0:
            return value
    raise UsageError(
        f"the model's configuration does not say its {name}",
        have=", ".join(sorted(fields)),
        want=f"{name}: a whole number above 0",
        do="complete config.json, or model.fresh",
    )


def _layer(family: Family, fields: Mapping[str, Any], index: int) -> Layer:
    hidden, heads = _field(fields, "hidden_size"), _field(fields, "num_attention_heads")
    key_heads = fields.get("num_key_value_heads", family.key_heads) or heads
    width = fields.get("head_dim") or family.head_dim or hidden // heads
    query, key = heads * width, key_heads * width
    experts = _experts(fields, index) if family.experts else 0
    names = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    intermediate = _field(fields, *names)
    biased = bool(fields.get("attention_bias"))
    projections = zip((query, key, key), "qkv", strict=True)
    weights = [Weight(rows, hidden, True, f"{each}_proj") for rows, each in projections]
    if biased or family.biased:
        weights += [Weight(rows, 1, True) for rows in (query, key, key)]
    weights += [Weight(hidden, query, True, "o_proj")]
    weights += [Weight(hidden)] if biased and not family.biased else []
    weights += [Weight(hidden)] * family.norms_per_layer
    weights += [Weight(width)] * 2 if family.query_norms == "head" else []
    weights += [Weight(query), Weight(key)] if family.query_norms == "full" else []
    weights += _mlp(hidden, intermediate, experts)
    if fields.get("mlp_bias") and not experts:
        weights += [Weight(intermediate, 1, True)] * 2 + [Weight(hidden)]
    return Layer(
        hidden,
        query,
        key,
        heads,
        key_heads,
        intermediate,
        experts,
        _field(fields, "num_experts_per_tok") if experts else 0,
        _window(family, fields, index),
        tuple(weights),
    )


def _mlp(hidden: int, intermediate: int, experts: int) -> Iterator[Weight]:
    if experts:
        yield Weight(experts, hidden)
        elements = intermediate * hidden
        yield Weight(experts, 2 * elements, True, "experts.gate_up_proj", hidden, experts)
        yield Weight(experts, elements, True, "experts.down_proj", intermediate, experts)
        return
    yield Weight(intermediate, hidden, True, "gate_proj")
    yield Weight(intermediate, hidden, True, "up_proj")
    yield Weight(hidden, intermediate, True, "down_proj")


def _experts(fields: Mapping[str, Any], index: int) -> int:
    """Experts of a layer; 0 where it has a plain MLP."""
    plain = index in (fields.get("mlp_only_layers") or ())
    if plain or (index + 1) % (fields.get("decoder_sparse_step") or 1):
        return 0
    return _field(fields, "num_experts", "num_local_experts")


def _window(family: Family, fields: Mapping[str, Any], index: int) -> int | None:
    window = fields.get("sliding_window")
    if not isinstance(window, int):
        return None
    if kinds := fields.get("layer_types"):
        if index >= len(kinds):
            raise UsageError(
                "the model's layer_types are fewer than its layers",
                have=f"{len(kinds)} layer_types",
                want=f"{_field(fields, 'num_hidden_layers')}, as num_hidden_layers says",
                do="correct config.json, or model.fresh",
            )
        return window if kinds[index] == "sliding_attention" else None
    if family.windowed:
        period = fields.get("sliding_window_pattern")
        return None if period and (index + 1) % period == 0 else window
    if not fields.get("use_sliding_window"):
        return None
    return window if index >= fields.get("max_window_layers", 0) else None


def _active(layer: Layer) -> int:
    """Elements of the matrices that one token is multiplied with."""
    total = 0
    for weight in layer.weights:
        if weight.columns == 1:
            continue
        expert = layer.experts and weight.rows == layer.experts and weight.columns != layer.hidden
        total += weight.elements * layer.chosen // layer.experts if expert else weight.elements
    return total
