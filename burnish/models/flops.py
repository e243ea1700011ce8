"""Floating-point operations that a model needs, counted from its shapes.

A matrix product of [m, k] and [k, n] counts 2 m k n. Per token every weight matrix costs two
operations per element (of the experts, the share that is active); attention costs 4 · heads ·
head_dim per pair of a query and a key it sees, half of all pairs under a causal mask, fewer under a
sliding window. Training costs three forward passes: the backward pass computes two products for
each one of the forward. Recomputation is not counted: these are the operations of the model, not of
an implementation (PaLM, arXiv 2204.02311, appendix B). Norms, activations, softmax and embedding
look-ups are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PretrainedConfig

from burnish.models.building import build_on_meta

_EXPERT = re.compile(r"(^|\.)experts(\.|$)")


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """What pairs of tokens cost in one layer."""

    per_pair: int
    """Operations per pair of query and key: 2 · heads · (query width + value width)."""
    window: int | None
    """Most keys a query sees, itself included; None: all before it."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The coefficients of a model's cost; made once, then cheap to ask."""

    per_token: float
    """Operations of all weight matrices, output layer included, for one token, forward."""
    attention: tuple[AttentionCost, ...]
    """One entry per attention layer."""

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> ModelFlops:
        """Count from a model built without memory."""
        model = build_on_meta(hf_config)
        text = hf_config.get_text_config()
        return cls(
            per_token=2.0 * sum(_active_weights(model, text)),
            attention=tuple(_attention_costs(model, text)),
        )

    def forward(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths, in tokens."""
        total = 0.0
        for length in lengths:
            total += self.per_token * length
            total += sum(cost.per_pair * pairs(length, cost.window) for cost in self.attention)
        return total

    def training(self, lengths: Iterable[int]) -> float:
        """Operations of forward and backward."""
        return 3.0 * self.forward(lengths)


def pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one it sees: itself and those before it, at most `window` in all."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _active_weights(model: nn.Module, config: PretrainedConfig) -> Iterator[float]:
    """Elements of each weight matrix that one token is multiplied with (a tied head counts, embeddings do not)."""
    chosen = getattr(config, "num_experts_per_tok", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2:
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
    for module in model.modules():
        width = getattr(module, "head_dim", None)
        index = getattr(module, "layer_idx", None)
        if not hasattr(module, "is_causal") or width is None or index is None:
            continue
        query, value = (getattr(module, key, width) for key in ("qk_head_dim", "v_head_dim"))
        heads = config.num_attention_heads
        yield AttentionCost(2 * heads * (query + value), _window(module, config, index))


def _window(module: nn.Module, config: PretrainedConfig, index: int) -> int | None:
    """The layer's own window; where layers do not say (Mistral), the configuration's."""
    if hasattr(module, "sliding_window"):
        return cast("int | None", module.sliding_window)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] != "sliding_attention":
        return None
    return cast("int | None", getattr(config, "sliding_window", None))
