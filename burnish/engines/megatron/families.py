"""What Megatron must be told of a Hugging Face model: families as data, and what is not computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from burnish.errors import UsageError
from burnish.families import Family, family_of, layers_with_experts, names_of, window_of
from burnish.models.meta_init import plain_model
from burnish.models.value_head import has_value_head, head_has_bias

_IN_LAYER = re.compile(r".*\blayers\.\d+\.(.+)\.(?:weight|bias)")
_COMPUTED = {
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    *(f"self_attn.{letter}_proj" for letter in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
# What layers have in the families above, by transformers' names; experts aside.


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture's sizes."""

    count: int
    """Experts of a layer."""
    chosen: int
    """Experts that a token goes to."""
    width: int
    """Width of an expert's hidden layer."""
    renormalized: bool
    """The probabilities of the chosen ones are scaled to a sum of 1."""
    layers: tuple[bool, ...]
    """For each decoder layer, whether it is a mixture; the others are dense."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's sizes, in the terms of all families."""

    family: Family
    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Heads of queries."""
    key_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Width of a head."""
    width: int
    """Width of the hidden layer of a dense MLP."""
    vocabulary: int
    """Rows of the embedding."""
    padding: int | None
    """The token whose row of the embedding gets no gradient where it is read; None: there is none."""
    epsilon: float
    """Of RMSNorm."""
    tied: bool
    """Embedding and output layer are one."""
    value_bias: bool | None
    """Of a model with a value head whether that has a bias; None: it has a vocabulary."""
    windows: tuple[int | None, ...]
    """For each layer the tokens that a token sees, itself included; None: all before it."""
    experts: Experts | None
    """None for a dense model."""

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> Architecture:
        """Read a configuration. Raises `UsageError` that names what is not computed by this engine."""
        family = family_of(hf_config.model_type)
        if not family.has_llama_layers:
            raise UsageError(
                f"the Megatron engine does not know models of type {hf_config.model_type}",
                have=f"model_type: {hf_config.model_type}, {_missing(hf_config)}",
                want=f"one of {names_of('has_llama_layers')}",
                do="set engine.kind=torch",
            )
        problem = next(_uncomputed(hf_config), None)
        if problem is not None:
            raise UsageError(
                f"the Megatron engine does not compute {problem}",
                have=f"a model of type {hf_config.model_type} that has it",
                want="a model without it",
                do="set engine.kind=torch",
            )
        heads = hf_config.num_attention_heads
        has_values = has_value_head(hf_config)
        return cls(
            family=family,
            layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            heads=heads,
            key_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
            head_dim=_head_dim(hf_config),
            width=hf_config.intermediate_size,
            vocabulary=hf_config.vocab_size,
            padding=hf_config.pad_token_id,
            epsilon=hf_config.rms_norm_eps,
            tied=bool(hf_config.tie_word_embeddings) and not has_values,
            value_bias=head_has_bias(hf_config) if has_values else None,
            windows=_windows(hf_config),
            experts=_experts(hf_config) if family.has_router else None,
        )


def _missing(hf_config: PretrainedConfig) -> str:
    """What there is no counterpart for in a model of another family, in words."""
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "which is no language model of transformers"
    with torch.device("meta"):
        names = [name for name, _ in plain_model(hf_config).named_parameters()]
    inside = {found[1] for name in names if (found := _IN_LAYER.fullmatch(name))}
    unknown = sorted(inside - _COMPUTED)
    if not unknown:
        return "whose layers have the parts of Llama's, but may compute something else"
    return f"whose layers have {', '.join(unknown)}"


def _uncomputed(hf_config: PretrainedConfig) -> Iterator[str]:
    """What of the model would be computed wrongly, in words."""
    if hf_config.hidden_act != "silu":
        yield f"the activation {hf_config.hidden_act}"
    if getattr(hf_config, "attention_bias", False):
        yield "a bias in attention (attention_bias)"
    if getattr(hf_config, "mlp_bias", False):
        yield "a bias in the MLP (mlp_bias)"
    rope = hf_config.rope_parameters
    if rope["rope_type"] in ("dynamic", "longrope"):
        yield f"rotary positions that depend on the length ({rope['rope_type']})"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "heads that are rotated in part (partial_rotary_factor)"
    if has_value_head(hf_config):
        if hf_config.num_labels != 1:
            yield f"a head that says {hf_config.num_labels} things of a token"
    elif any("ForCausalLM" not in name for name in hf_config.architectures or ()):
        yield "another head than a vocabulary or a value"


def _head_dim(hf_config: PretrainedConfig) -> int:
    of_config: int | None = getattr(hf_config, "head_dim", None)
    return of_config or hf_config.hidden_size // hf_config.num_attention_heads


def _windows(hf_config: PretrainedConfig) -> tuple[int | None, ...]:
    family, layers = family_of(hf_config.model_type), range(hf_config.num_hidden_layers)
    return tuple(window_of(family, vars(hf_config), layer) for layer in layers)


def _experts(hf_config: PretrainedConfig) -> Experts:
    mixtures = layers_with_experts(vars(hf_config))
    return Experts(
        count=hf_config.num_experts,
        chosen=hf_config.num_experts_per_tok,
        width=getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size,
        renormalized=getattr(hf_config, "norm_topk_prob", True),
        layers=tuple(layer in mixtures for layer in range(hf_config.num_hidden_layers)),
    )
