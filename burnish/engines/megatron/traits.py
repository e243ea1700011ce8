"""What Megatron's layers need to know of a model, read from the modules of transformers' own on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from burnish.errors import UsageError
from burnish.families import Family, ModelSizes, family_of, names_of
from burnish.models.heads import has_value_head
from burnish.models.meta_init import model_sizes, plain_model, window_of

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
_LATENT = "kv_a_proj_with_mqa"
_OF_LATENTS = [
    *("q_proj.weight", "q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight"),
    *("q_b_proj.weight", f"{_LATENT}.weight", f"{_LATENT}.bias", "kv_a_layernorm.weight"),
    "kv_b_proj.weight",
]
_CHOICE_BIAS = "e_score_correction_bias"
MIXER = "linear_attn"
"""The name of Gated DeltaNet in a layer of transformers."""
_OF_MIXERS = [
    *("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"),
    *(f"in_proj_{part}.weight" for part in ("qkvz", "ba", "qkv", "z", "b", "a")),
]
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True, slots=True)
class _Swish:
    """x · sigmoid(alpha x)."""

    alpha: float

    def __call__(self, values: Tensor) -> Tensor:
        return values * torch.sigmoid(self.alpha * values)


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What may differ between decoder layers."""

    scaling: float
    """Factor on the products of queries and keys."""
    window: int | None
    """Tokens that a query sees, itself included; None: all before it."""
    softcap: float | None
    """Bound of the scores; None: no bound."""
    rotation: str | None
    """Key of its rotary positions in `ModelTraits.rotations`; None: it has none."""
    factor: float
    """Of the outputs of attention and MLP, before they are added to the hidden state."""
    has_experts: bool
    """The MLP is a router and experts."""
    has_sinks: bool = False
    """Each head has one more score, without a key and a value (`burnish.models.kernels.attention.Softmax`)."""
    has_state: bool = False
    """Gated DeltaNet takes the place of attention."""


@dataclass(frozen=True, slots=True)
class LatentTraits:
    """Widths of latent attention (arXiv 2405.04434, section 2.1)."""

    query_rank: int | None
    """Of the queries' latent; None: queries come from the hidden state."""
    key_rank: int
    """Of the latent of keys and values."""
    unrotated: int
    """Of the part of a query or key that has no position."""
    rotated: int
    """Of the part that has one, of which all heads have the same key."""
    values: int
    """Of a head's values."""
    bias: bool
    """The projections to latents have biases."""
    neighbours: bool
    """See `Family.rotates_neighbours`."""
    epsilon: float
    """Of the latents' RMSNorms."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """A model that this engine computes."""

    sizes: ModelSizes
    layers: tuple[LayerTraits, ...]
    """From first to last."""
    activation: Activation
    """Of gated MLPs and experts."""
    epsilon: float
    """Of every RMSNorm."""
    qkv_bias: bool
    """The projections to queries, keys and values have biases."""
    out_bias: bool
    """The projection behind attention has a bias."""
    mlp_bias: bool
    """The projections of dense MLPs have biases."""
    router_bias: bool
    """Routers' logits have a bias that is trained."""
    choice_bias: tuple[int, ...] | None
    """Shape of the routers' bias that chooses experts (`Family.router_bias`); None: there is none."""
    activation_limit: float | None
    """Bound of an expert's gate from above, and of its other factor from both sides; None: no bound."""
    block_norms: tuple[str, str, str, str]
    """As in `Family`, without those that the model has not."""
    embedding_factors: tuple[float, float]
    """Of the embeddings: one that is rounded to their dtype, as Gemma's, and one that is not, as Granite's."""
    shared_width: int
    """Columns of the expert that every token goes to; 0: there is none."""
    topk_method: str
    """How DeepSeek-V2's softmax routers choose, whose weights are never normalized; empty: the routers are others."""
    gates_shared: bool
    """That expert's output is multiplied by the sigmoid of a gate."""
    gates_attention: bool
    """The output of attention is multiplied by the sigmoid of gates, which come with the queries."""
    mixer: Callable[[int, int], nn.Module] | None
    """Makes transformers' Gated DeltaNet of a layer, from 0, with one part of its heads of so many."""
    mixer_heads: int
    """Key heads of Gated DeltaNet; 0: no layer has it."""
    latent: LatentTraits | None
    """Of its latent attention; None: queries, keys and values come from the hidden state."""
    rotary: Callable[[PretrainedConfig], nn.Module]
    """Makes the module of rotary positions."""
    rotations: tuple[str, ...]
    """Layer types with rotary positions of their own; one empty string: all layers have the same."""

    def embedding_factor(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings in this dtype."""
        rounded, exact = self.embedding_factors
        return float(torch.tensor(rounded, dtype=dtype)) * exact

    @property
    def family(self) -> Family:
        """The facts about the model's type."""
        return self.sizes.family


def model_traits(hf_config: PretrainedConfig) -> ModelTraits:
    """Read a model. Raises `UsageError` naming a feature that this engine lacks."""
    kind = hf_config.model_type
    family = family_of(kind)
    if not family.on_megatron:
        what = f"does not know models of type {kind}"
        if any(name.startswith(("mamba_", "ssm_")) for name in hf_config.to_dict()):
            # Megatron-Core 0.16 and 0.19 have Mamba 2's mixer for CUDA alone, with the kernels of mamba-ssm.
            what = f"has no layers with Mamba, which models of type {kind} have"
        raise UsageError(
            f"the Megatron engine {what}",
            have=f"model_type: {kind}",
            want=f"one of {names_of('on_megatron')}",
            do="set engine.kind=torch",
        )
    with torch.device("meta"):
        model: Any = plain_model(hf_config)
    layers = model.base_model.layers
    if problem := next(_uncomputed(hf_config, family, layers), None):
        raise UsageError(
            f"the Megatron engine does not compute {problem}",
            have=f"a model of type {kind} that has it",
            want="a model without it",
            do="set engine.kind=torch",
        )
    attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))
    if not hasattr(attention, family.query_norm_names[0]):
        family = replace(family, query_norms="none")
    values = getattr(attention, family.qkv_name.format(part="v"), None)
    latent = _latent(attention, hf_config, family) if hasattr(attention, _LATENT) else None
    held = (*layers.named_buffers(), *layers.named_parameters())
    biases = (tuple(each.shape) for name, each in held if name.endswith(_CHOICE_BIAS))
    names = [name for name, _ in layers.named_parameters()]
    alpha = hf_config.swiglu_alpha if family.stacks_experts else None
    by_type = any(isinstance(each, Mapping) for each in hf_config.rope_parameters.values())
    shared = (getattr(layer.mlp, family.shared_expert or "-", None) for layer in layers)
    widths = (each.down_proj.in_features for each in shared if each is not None)
    methods = (getattr(getattr(layer.mlp, "gate", None), "topk_method", "") for layer in layers)
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    mixers = [kind for layer in layers if (kind := getattr(layer, MIXER, None)) is not None]
    norms = [
        name if hasattr(getattr(layers[0], name or "-", None), "weight") else ""
        for name in family.block_norms
    ]
    return ModelTraits(
        sizes=replace(model_sizes(hf_config), family=family),
        layers=tuple(
            _layer(layer, hf_config, family, number, by_type=by_type)
            for number, layer in enumerate(layers)
        ),
        activation=_ACTIVATIONS[_activation(hf_config)] if alpha is None else _Swish(alpha),
        activation_limit=hf_config.swiglu_limit if family.stacks_experts else None,
        epsilon=hf_config.rms_norm_eps,
        qkv_bias=getattr(values, "bias", None) is not None,
        out_bias=attention.o_proj.bias is not None,
        mlp_bias=any(f".{family.projections[2]}.bias" in name for name in names),
        choice_bias=next(biases, None),
        router_bias=any(name.endswith(f"mlp.{family.router_module}.bias") for name in names),
        block_norms=(norms[0], norms[1], norms[2], norms[3]),
        embedding_factors=(scale, getattr(hf_config, "embedding_multiplier", 1.0)),
        shared_width=next(widths, 0),
        topk_method=next(filter(None, methods), ""),
        gates_shared=any(hasattr(layer.mlp, f"{family.shared_expert}_gate") for layer in layers),
        gates_attention=_gates(attention, hf_config),
        mixer=partial(_mixer, type(mixers[0]), hf_config) if mixers else None,
        mixer_heads=mixers[0].num_k_heads if mixers else 0,
        latent=latent,
        rotary=type(model.base_model.rotary_emb),
        rotations=tuple(sorted(set(hf_config.layer_types))) if by_type else ("",),
    )


def _layer(
    layer: Any, hf_config: PretrainedConfig, family: Family, number: int, *, by_type: bool
) -> LayerTraits:
    factor = getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))
    has_experts = hasattr(layer.mlp, "experts")
    if hasattr(layer, MIXER):
        return LayerTraits(1.0, None, None, None, factor, has_experts, has_state=True)
    attention = layer.self_attn
    window = window_of(attention, hf_config, number)
    rotates = getattr(attention, "use_rope", True)
    if family.rotates_in_windows and hf_config.sliding_window is not None:
        rotates = window is not None
    rotation = hf_config.layer_types[number] if by_type else ""
    return LayerTraits(
        scaling=attention.scaling,
        window=window,
        softcap=attention.attn_logit_softcapping if family.caps_scores else None,
        rotation=rotation if rotates else None,
        factor=factor,
        has_experts=has_experts,
        has_sinks=hasattr(attention, "sinks"),
    )


def _mixer(
    kind: Callable[..., nn.Module], hf_config: PretrainedConfig, layer: int, ranks: int
) -> nn.Module:
    own = copy.copy(hf_config)
    own.linear_num_key_heads //= ranks
    own.linear_num_value_heads //= ranks
    return kind(own, layer)


def _gates(attention: Any, hf_config: PretrainedConfig) -> bool:
    queries = getattr(attention, "q_proj", None)
    width = hf_config.num_attention_heads * getattr(attention, "head_dim", 0)
    return queries is not None and queries.out_features == 2 * width


def _latent(attention: Any, hf_config: PretrainedConfig, family: Family) -> LatentTraits:
    return LatentTraits(
        query_rank=attention.q_lora_rank,
        key_rank=attention.kv_lora_rank,
        unrotated=attention.qk_nope_head_dim,
        rotated=attention.qk_rope_head_dim,
        values=attention.v_head_dim,
        bias=getattr(attention, _LATENT).bias is not None,
        neighbours=getattr(hf_config, "rope_interleave", family.rotates_neighbours),
        epsilon=attention.kv_a_layernorm.variance_epsilon,
    )


def _activation(hf_config: PretrainedConfig) -> str:
    return getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act


def _uncomputed(hf_config: PretrainedConfig, family: Family, layers: Any) -> Iterator[str]:
    if (activation := _activation(hf_config)) not in _ACTIVATIONS:
        yield f"the activation {activation}"
    if getattr(hf_config, "clip_qkv", None) is not None:
        yield "bounds of queries, keys and values (clip_qkv)"
    attentions = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    if not attentions:
        yield "models without attention"
        return
    if not all(attention.is_causal for attention in attentions):
        yield "attention to later tokens (use_bidirectional_attention)"
    known = _computed(family, hasattr(attentions[0], _LATENT))
    for name, _ in layers.named_parameters():
        if name.split(".", 1)[1] not in known:
            yield f"the parameter model.layers.{name}"
    if has_value_head(hf_config):
        if hf_config.num_labels != 1:
            yield f"a head with {hf_config.num_labels} values per token"
    elif any("ForCausalLM" not in name for name in hf_config.architectures or ()):
        yield "a head that is neither a language model's nor a value head"


def _computed(family: Family, latent: bool) -> set[str]:
    """Return the names of the parameters of a layer, as transformers' model has them."""
    mlp = [f"{name}.weight" for name in family.projections]
    mlp += [f"{family.shared_expert}.{name}" for name in mlp] if family.shared_expert else []
    mlp += [f"{name}.bias" for name in family.projections]
    mlp += [*_EXPERTS, f"{family.shared_expert}_gate.weight", f"{family.router_module}.weight"]
    mlp += [f"{family.router_module}.{family.router_bias}"] if family.router_bias else []
    if family.stacks_experts:
        mlp += [f"{family.router_module}.bias", *(f"{name}_bias" for name in _EXPERTS)]
    norms = family.query_norm_names if family.query_norms != "none" else ()
    qkv = {family.qkv_name.format(part=letter) for letter in "qkv"}
    attention = [f"{name}.{kind}" for name in qkv for kind in ("weight", "bias")]
    attention = _OF_LATENTS if latent else [*attention, "sinks"]
    attention = [*attention, "o_proj.weight", "o_proj.bias", *(f"{name}.weight" for name in norms)]
    return {
        *(f"mlp.{name}" for name in mlp),
        *(f"{MIXER}.{name}" for name in _OF_MIXERS),
        *(f"self_attn.{name}" for name in attention),
        *(f"{name}.weight" for name in family.norms),
    }
