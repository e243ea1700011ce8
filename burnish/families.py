"""The table of model families, and a model's shape from its config.json, without torch.

Only this module names model types of transformers; other code asks for a capability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd, prod
from typing import Any, Literal

from burnish.errors import UsageError

_LLAMA_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
_NORMS_BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_GLM4_NORMS = (
    "input_layernorm", "post_self_attn_layernorm",
    "post_attention_layernorm", "post_mlp_layernorm",
)  # fmt: skip
_LONG_NAMES = ("query_layernorm", "key_layernorm")
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_MIXTRAL_MLP = ("w1", "w3", "w2")
_FUSED_MLP = ("gate_up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """How a model type differs from Llama where config.json does not say."""

    described: bool = True
    """Whether this table is complete for the type, as the planner and fused layers need."""
    on_megatron: bool = True
    """Whether the Megatron engine computes the type. It reads the model's modules for what this table lacks."""
    block_norms: tuple[str, str, str, str] = _LLAMA_NORMS
    """RMSNorms before and after attention, before and after the MLP; empty where there is none."""
    norm_in_fp32: bool = False
    """RMSNorm multiplies by its weight in fp32 and rounds afterwards; Llama rounds first."""
    norm_offset: float = 0.0
    """Added to the weight of a norm."""
    query_norms: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: none, each head by itself, or all heads together."""
    query_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """Names of these norms."""
    norms_rotated: bool = False
    """These norms come after the rotation."""
    rotates_neighbours: bool = False
    """Rotary positions rotate each even dim with the next one; others rotate the two halves of a head."""
    rotates_in_windows: bool = False
    """If there is a window, only layers that have it have rotary positions."""
    caps_scores: bool = False
    """Attention scores are bounded by attn_logit_softcapping, where config.json has it."""
    qkv_name: str = "{part}_proj"
    """Name of the projections to q, k and v. Without `{part}` their rows stand one after another in one tensor."""
    qkv_bias: bool = False
    """The projections to queries, keys and values always have biases."""
    optional_biases: tuple[str, ...] = ("attention_bias",)
    """Fields of config.json that add biases."""
    has_router: bool = False
    """Layers have routers that send each token to its top-k experts."""
    scores_by_sigmoid: bool = False
    """Routers score by sigmoid (arXiv 2412.19437, equation 15); others by softmax."""
    router_bias: str = ""
    """Name of the routers' bias in the checkpoint, if they choose by score + bias (arXiv 2412.19437, equation 16)."""
    softmax_of_chosen: bool = False
    """The router's softmax is over the logits of the chosen experts."""
    experts_module: str = "mlp"
    """Name of the part of a layer that holds router and experts, in the checkpoint."""
    router_module: str = "gate"
    """Name of the router in that part."""
    stacks_experts: bool = False
    """The checkpoint has a layer's experts in tensors [experts, in, out] with biases; gate and up take turns along `out`."""
    shared_expert: str = ""
    """Name of the expert that every token goes to; empty: there is none."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an MLP's gate, up and down projection. One name twice: gate above up in one tensor."""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's, in the checkpoint."""
    multiplies_logits_scaling: bool = False
    """Logits are multiplied by `logits_scaling`; other families divide by it."""
    key_heads: int | None = None
    """Default of num_key_value_heads; None: num_attention_heads."""
    head_dim: int | None = None
    """Default of head_dim; None: hidden_size / num_attention_heads."""
    tied: bool = False
    """Default of tie_word_embeddings."""
    windows: Literal["never", "always", "switched", "by_layer"] = "never"
    """Layers with a sliding window: none, all, all if use_sliding_window, or those that layer_types names."""
    reads_directly: tuple[str, ...] = ()
    """Linear layers whose weights the model reads without calling the layer, so that an adapter would be passed over."""
    window_period: int = 0
    """If layer_types is missing, one in this many layers has no window; 0: max_window_layers decides."""

    @property
    def norms(self) -> tuple[str, ...]:
        """RMSNorms on the hidden state of a layer."""
        return tuple(filter(None, self.block_norms))

    @property
    def has_llama_layers(self) -> bool:
        """Layers compute what Llama's do, except for biases, norms per head, windows and experts."""
        has_norms = self.block_norms == _LLAMA_NORMS and not self.norm_in_fp32
        return self.described and has_norms and self.query_norms != "full"

    @property
    def cuts_heads(self) -> bool:
        """Tensor parallelism can divide the heads: no norm spans all of them."""
        return self.described and self.query_norms != "full"


_undescribed = partial(Family, described=False)
_on_torch = partial(_undescribed, on_megatron=False)
_like_gemma = partial(_undescribed, norm_in_fp32=True, norm_offset=1.0)
_mixture = partial(_undescribed, has_router=True, shared_expert="shared_experts")
_by_sigmoid = partial(_mixture, scores_by_sigmoid=True, router_bias="gate.e_score_correction_bias")
_of_hunyuan = partial(
    _undescribed, query_norms="head", query_norm_names=_LONG_NAMES, norms_rotated=True
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(optional_biases=("attention_bias", "mlp_bias")),
    "mistral": Family(windows="always", optional_biases=(), key_heads=8),
    "mixtral": Family(
        windows="always",
        optional_biases=(),
        has_router=True,
        experts_module="block_sparse_moe",
        expert_projections=_MIXTRAL_MLP,
        key_heads=8,
    ),
    "qwen2": Family(qkv_bias=True, optional_biases=(), windows="by_layer", key_heads=32),
    "qwen3": Family(query_norms="head", windows="by_layer", head_dim=128, key_heads=32),
    "qwen3_moe": Family(query_norms="head", has_router=True, windows="switched", key_heads=4),
    "gemma3_text": Family(
        block_norms=_GEMMA_NORMS,
        norm_in_fp32=True,
        norm_offset=1.0,
        query_norms="head",
        head_dim=256,
        tied=True,
        windows="by_layer",
        window_period=6,
        key_heads=4,
    ),
    "gemma": _like_gemma(tied=True),
    "gemma2": _like_gemma(block_norms=_GEMMA_NORMS, caps_scores=True, tied=True),
    "olmo2": Family(block_norms=_NORMS_BEHIND, norm_in_fp32=True, query_norms="full"),
    "olmo3": _undescribed(block_norms=_NORMS_BEHIND, norm_in_fp32=True, query_norms="full"),
    "flex_olmo": _undescribed(block_norms=_NORMS_BEHIND, query_norms="full", has_router=True),
    "olmoe": _undescribed(query_norms="full", has_router=True),
    "qwen2_moe": _undescribed(has_router=True, shared_expert="shared_expert"),
    **dict.fromkeys(("cwm", "granite", "ministral", "seed_oss", "smollm3"), _undescribed()),
    "exaone4": _undescribed(block_norms=_NORMS_BEHIND, query_norms="head", rotates_in_windows=True),
    "hunyuan_v1_dense": _of_hunyuan(),
    "hunyuan_v1_moe": _of_hunyuan(
        has_router=True, router_module="gate.wg", shared_expert="shared_mlp"
    ),
    **dict.fromkeys(("ernie4_5", "helium"), _undescribed(rotates_neighbours=True)),
    "ernie4_5_moe": _mixture(
        rotates_neighbours=True, router_bias="moe_statics.e_score_correction_bias"
    ),
    "glm": _undescribed(rotates_neighbours=True, projections=_FUSED_MLP),
    "glm4": _undescribed(block_norms=_GLM4_NORMS, rotates_neighbours=True, projections=_FUSED_MLP),
    "phi3": _undescribed(qkv_name="qkv_proj", projections=_FUSED_MLP),
    "hyperclovax": _undescribed(
        block_norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        multiplies_logits_scaling=True,
    ),
    **dict.fromkeys(("dots1", "glm4_moe"), _by_sigmoid(query_norms="head")),
    "exaone_moe": _by_sigmoid(
        router_bias="e_score_correction_bias", query_norms="head", rotates_in_windows=True
    ),
    "minimax_m2": _by_sigmoid(
        query_norms="full",
        router_bias="e_score_correction_bias",
        shared_expert="",
        experts_module="block_sparse_moe",
        expert_projections=_MIXTRAL_MLP,
    ),
    "solar_open": _by_sigmoid(),
    **dict.fromkeys(("minicpm3", "youtu"), _undescribed(query_norm_names=_LATENT_NORMS)),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _by_sigmoid(query_norm_names=_LATENT_NORMS)),
    "deepseek_v2": _mixture(rotates_neighbours=True, query_norm_names=_LATENT_NORMS),
    "gpt_oss": _undescribed(
        has_router=True, softmax_of_chosen=True, router_module="router", stacks_experts=True
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"),
        _like_gemma(query_norms="head", has_router=True, shared_expert="shared_expert"),
    ),
    "qwen3_5_text": _like_gemma(query_norms="head"),
    "gemma3n_text": _on_torch(reads_directly=("correction_coefs",)),
    "jamba": _on_torch(reads_directly=("dt_proj",)),
    "longcat_flash": _on_torch(reads_directly=("classifier",)),
}
"""By `model_type`. Defaults are those of transformers' configuration classes."""


def family_of(model_type: str) -> Family:
    """Return a model type's family; one outside the table is not `described`."""
    return FAMILIES.get(model_type, _on_torch())


def names_of(capability: str) -> str:
    """Return the model types with a capability."""
    return ", ".join(name for name, each in FAMILIES.items() if getattr(each, capability))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's fields of any config.json."""
    return dict(config) | dict(config.get("text_config") or {})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ between decoder layers."""

    intermediate: int
    """Width of the MLP, or of one expert."""
    experts: int
    """Experts; 0 for a dense MLP."""
    experts_per_token: int
    """Experts that each token goes to; 0 for a dense MLP."""
    window: int | None
    """Tokens that a query sees, itself included; None: all before it."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of every parameter, as transformers' model has them: `self_attn.q_proj.weight`, `mlp.experts.down_proj`."""


@dataclass(frozen=True)
class ModelSizes:
    """A model's sizes. Sizes that the configuration lacks are 0."""

    family: Family
    tied: bool
    """The output layer shares the embedding's weight."""
    depth: int
    """Decoder layers."""
    hidden: int
    """Width of the hidden state."""
    heads: int
    """Query heads of a layer."""
    key_heads: int
    """Key heads, which is also the number of value heads."""
    head_dim: int
    """Width of a head."""
    intermediate: int
    """Width of a dense MLP; 0 if every layer has experts."""
    experts: int
    """Experts of a layer; 0 if no layer has experts."""
    expert_intermediate: int
    """Width of an expert; the common divisor of all widths if layers differ."""
    vocabulary: int
    """Rows of the embedding."""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads."""
        return self.key_heads * self.head_dim

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Read a config.json of any model type."""
        fields = text_config(config)
        family = family_of(str(fields.get("model_type")))
        depth = _size(fields, "num_hidden_layers")
        hidden = _size(fields, "hidden_size")
        heads = _size(fields, "num_attention_heads")
        mixtures = layers_with_experts(fields)
        experts = _size(fields, *EXPERT_COUNTS) if mixtures else 0
        intermediate = _size(fields, "intermediate_size")
        return cls(
            family=family,
            tied=bool(fields.get("tie_word_embeddings", family.tied)),
            depth=depth,
            hidden=hidden,
            heads=heads,
            key_heads=_size(fields, "num_key_value_heads") or family.key_heads or heads,
            head_dim=_size(fields, "head_dim") or family.head_dim or hidden // max(heads, 1),
            intermediate=0 if experts and len(mixtures) == depth else intermediate,
            experts=experts,
            expert_intermediate=(_size(fields, "moe_intermediate_size") or intermediate)
            if experts
            else 0,
            vocabulary=_size(fields, "vocab_size"),
        )


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of config.json that hold the number of experts of a layer."""
SIZE_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    *EXPERT_COUNTS,
)
"""Fields of config.json that `ModelSizes` reads, under the names that most families use."""


@dataclass(frozen=True)
class ModelShape(ModelSizes):
    """The sizes and parameters of a model of a family in the table."""

    layers: tuple[LayerShape, ...]
    """From first to last."""
    adaptable: tuple[str, ...] = ()
    """Linear layers that an adapter without targets adapts; empty: all."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json. Raises `UsageError` for an unknown family or wrong fields."""
        fields = text_config(config)
        kind = str(fields.get("model_type"))
        family = family_of(kind)
        if not family.described:
            raise UsageError(
                f"Burnish does not know the shape of models of type {kind}",
                have=f"model_type: {kind}",
                want=f"one of {names_of('described')}",
                do="run a short training of it and read perf/max_memory_gb/all",
            )
        for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"):
            _positive(fields, name)
        sizes = ModelSizes.of(fields)
        layers = tuple(_layer(family, sizes, fields, index) for index in range(sizes.depth))
        return cls(**vars(sizes), layers=layers)

    @cached_property
    def counts(self) -> Counter[LayerShape]:
        """How many layers there are of each kind."""
        return Counter(self.layers)

    @cached_property
    def elements(self) -> int:
        """Elements of all parameters."""
        layers = sum(count * _elements(each.parameters) for each, count in self.counts.items())
        return layers + _elements(self.parameters)

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of every parameter outside the layers."""
        table = (self.vocabulary, self.hidden)
        norm = (self.hidden,)
        outside = (("model.embed_tokens.weight", table), ("model.norm.weight", norm))
        return outside if self.tied else (*outside, ("lm_head.weight", table))


def _elements(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    return sum(prod(shape) for _, shape in parameters)


def layers_with_experts(fields: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the layers that have experts."""
    dense = fields.get("mlp_only_layers") or ()
    every = fields.get("decoder_sparse_step") or 1
    layers = range(_size(fields, "num_hidden_layers"))
    if kinds := fields.get("mlp_layer_types"):
        return [index for index, kind in zip(layers, kinds, strict=False) if kind == "sparse"]
    if every_nth := fields.get("moe_layer_interval"):
        last = fields.get("moe_layer_end_index", -1) % len(layers)
        some = layers[fields.get("moe_layer_start_index", 0) : last + 1]
        return [index for index in some if (index + 1) % every_nth == 0]
    first = fields.get("first_k_dense_replace") or 0
    others = layers[first:]
    return [index for index in others if index not in dense and (index + 1) % every == 0]


def _window(family: Family, fields: Mapping[str, Any], index: int) -> int | None:
    window: int | None = fields.get("sliding_window")
    if window is None or family.windows == "never":
        return None
    if family.windows == "always":
        return window
    is_switched_on = bool(fields.get("use_sliding_window"))
    if family.windows == "switched":
        return window if is_switched_on else None
    if kinds := fields.get("layer_types"):
        if index >= len(kinds):
            raise UsageError(
                "the model has fewer layer_types than layers",
                have=f"{len(kinds)} layer_types",
                want=f"{_positive(fields, 'num_hidden_layers')}, as num_hidden_layers says",
                do="correct config.json, or model.fresh",
            )
        return window if kinds[index] == "sliding_attention" else None
    if family.window_period:
        period = fields.get("sliding_window_pattern") or family.window_period
        return window if (index + 1) % period else None
    return window if is_switched_on and index >= fields.get("max_window_layers", 0) else None


def _positive(fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(value := fields.get(name), int) and value > 0:
            return value
    raise UsageError(
        f"the model's configuration has no {names[0]}",
        have=", ".join(sorted(fields)),
        want=f"{names[0]}: a whole number above 0",
        do="complete config.json, or model.fresh",
    )


def _size(fields: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields above 0, or 0. A list counts as its common divisor."""
    for name in names:
        value = fields.get(name)
        values = value if isinstance(value, list | tuple) else [value]
        if values and all(isinstance(each, int) and each > 0 for each in values):
            return gcd(*values)
    return 0


def _layer(family: Family, sizes: ModelSizes, fields: Mapping[str, Any], index: int) -> LayerShape:
    hidden = sizes.hidden
    head_dim = sizes.head_dim
    query = sizes.query
    key = sizes.key
    attention_bias, mlp_bias = (
        name in family.optional_biases and bool(fields.get(name))
        for name in ("attention_bias", "mlp_bias")
    )
    qkv_bias = family.qkv_bias or attention_bias
    linear = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (key, hidden, qkv_bias),
        "self_attn.v_proj": (key, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, attention_bias),
    }
    parameters: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in family.norms}
    if family.query_norms != "none":
        each_head = family.query_norms == "head"
        parameters["self_attn.q_norm.weight"] = (head_dim if each_head else query,)
        parameters["self_attn.k_norm.weight"] = (head_dim if each_head else key,)
    experts = 0
    chosen = 0
    if family.has_router and index in layers_with_experts(fields):
        experts = _positive(fields, *EXPERT_COUNTS)
        chosen = _positive(fields, "num_experts_per_tok")
        width = _positive(fields, "moe_intermediate_size", "intermediate_size")
        parameters["mlp.gate.weight"] = (experts, hidden)
        parameters["mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        parameters["mlp.experts.down_proj"] = (experts, hidden, width)
    else:
        width = _positive(fields, "intermediate_size")
        linear |= {f"mlp.{each}_proj": (width, hidden, mlp_bias) for each in ("gate", "up")}
        linear["mlp.down_proj"] = (hidden, width, mlp_bias)
    for name, (rows, columns, has_bias) in linear.items():
        parameters[f"{name}.weight"] = (rows, columns)
        if has_bias:
            parameters[f"{name}.bias"] = (rows,)
    window = _window(family, fields, index)
    return LayerShape(width, experts, chosen, window, tuple(parameters.items()))
