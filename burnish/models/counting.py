"""What a model's operations are counted from: the shapes of its weights and the widths of its attention.

Works on any model that Burnish builds, because it looks at modules and parameters and at no table of
families.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from torch import nn
from transformers import PretrainedConfig

from burnish.models.flops import AttentionCost, ModelFlops
from burnish.models.meta_init import build_on_meta
from burnish.models.names import is_matrix

_EXPERT = re.compile(r"(^|\.)experts(\.|$)")


def count_flops(hf_config: PretrainedConfig) -> ModelFlops:
    """The operations of a model of this configuration, counted from one built without memory."""
    model = build_on_meta(hf_config)
    text = hf_config.get_text_config()
    head = model.get_output_embeddings()
    return ModelFlops(
        per_token=2.0 * sum(_active_weights(model, text)),
        attention=tuple(_attention_costs(model, text)),
        head=2.0 * head.weight.numel() if isinstance(head, nn.Linear) else 0.0,
    )


def _active_weights(model: nn.Module, config: PretrainedConfig) -> Iterator[float]:
    """Elements of each weight matrix that one token is multiplied with (a tied head counts, embeddings do not)."""
    chosen = getattr(config, "num_experts_per_tok", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if not is_matrix(f"{name}.{own}", parameter.ndim):
                continue
            share = 1.0
            if chosen is not None and _EXPERT.search(name):
                share = chosen / _experts(config, parameter.shape)
            yield parameter.numel() * share


def _experts(config: PretrainedConfig, shape: tuple[int, ...]) -> int:
    """How many experts there are: the first dim of a fused weight, the configuration's number otherwise."""
    if len(shape) == 3:
        return shape[0]
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for n in (getattr(config, name, None) for name in names) if n), 1)


def _attention_costs(model: nn.Module, config: PretrainedConfig) -> Iterator[AttentionCost]:
    heads: int = config.num_attention_heads
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    for position, module in enumerate(attentions):
        # Latent attention (DeepSeek's) has queries and values of different widths; GPT-NeoX has a name of its own.
        names = ("qk_head_dim", "head_dim", "head_size")
        widths = (getattr(module, name, None) for name in names)
        query = next((width for width in widths if width), config.hidden_size // heads)
        value = getattr(module, "v_head_dim", None) or query
        window = _window(module, config, getattr(module, "layer_idx", position))
        yield AttentionCost(2 * heads * (query + value), window)


def _window(module: nn.Module, config: PretrainedConfig, index: int) -> int | None:
    """The layer's own window; where layers do not say (Mistral), the configuration's."""
    if hasattr(module, "sliding_window"):
        return cast("int | None", module.sliding_window)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] != "sliding_attention":
        return None
    return cast("int | None", getattr(config, "sliding_window", None))
