"""Tokens in, last hidden states out: through the model's own modules, or through fewer and larger steps.

A decoding step of a small batch spends its time between the matrix products. For the plain
Llama-shaped families `FusedForward` computes the same from the same weights with one product for
queries, keys and values and one for gate and up. Every other family runs through `ModuleForward`,
transformers' own code. The tests hold both equal. Left out: CUDA graphs and compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedModel

from burnish.models.attention import Attends

FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type`s whose blocks `FusedForward` knows."""


class Forward(Protocol):
    """The model up to its output layer."""

    def __call__(self, token_ids: Tensor, positions: Tensor, packing: Attends) -> Tensor:
        """Hidden states [T, hidden] of `token_ids` [T] at `positions` [T]."""


def forward_of(model: PreTrainedModel) -> Forward:
    """The fastest forward that is known to be right for this model.

    May give weights new memory (views of fused ones), so take shards of the model afterwards.
    """
    return FusedForward(model) if _is_plain(model) else ModuleForward(model)


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether the blocks are as `FusedForward` computes them, with rotations of whole heads."""
    if model.config.model_type not in FUSED_FAMILIES:
        return False
    base: Any = model.base_model
    return all(
        2 * base.rotary_emb.inv_freq.numel() == layer.self_attn.head_dim for layer in base.layers
    )


class ModuleForward:
    """Any model, by its own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.base_model

    def __call__(self, token_ids: Tensor, positions: Tensor, packing: Attends) -> Tensor:
        """See `Forward`."""
        hidden: Tensor = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        return hidden


class FusedForward:
    """Pre-norm blocks of grouped attention with rotary positions and a gated MLP."""

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self._embed = base.embed_tokens
        self._rotary = base.rotary_emb
        self._blocks = [_Block(layer) for layer in base.layers]
        self._norm = _Norm(base.norm)

    def __call__(self, token_ids: Tensor, positions: Tensor, packing: Attends) -> Tensor:
        """See `Forward`."""
        hidden: Tensor = self._embed(token_ids)
        cos, sin = (part[0, :, None] for part in self._rotary(hidden[None], positions[None]))
        half = sin.shape[-1] // 2
        rotation = cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for block in self._blocks:
            hidden = block(hidden, rotation, packing)
        return self._norm(hidden)


class _Block:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention
        self._heads = attention.q_proj.out_features // attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._head_dim: int = attention.head_dim
        self._window = _sliding_window(attention)
        self._qkv = _fused((attention.q_proj, attention.k_proj, attention.v_proj))
        self._q_norm: Any = getattr(attention, "q_norm", None)
        self._k_norm: Any = getattr(attention, "k_norm", None)
        self._gate_up = _fused((mlp.gate_proj, mlp.up_proj))
        self._out, self._down, self._act = attention.o_proj, mlp.down_proj, mlp.act_fn
        self._norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: Attends) -> Tensor:
        attended = self._attend(self._norm(hidden), rotation, packing)
        hidden = hidden + linear(attended, self._out.weight, self._out.bias)
        gate, up = linear(self._mlp_norm(hidden), *self._gate_up).chunk(2, dim=-1)
        return hidden + linear(self._act(gate).mul_(up), self._down.weight, self._down.bias)

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: Attends) -> Tensor:
        """Attention of [T, hidden], before its output projection: [T, heads · head_dim]."""
        qkv = linear(hidden, *self._qkv).view(len(hidden), -1, self._head_dim)
        rotated, value = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if self._q_norm is not None:
            rotated = self._normalized(rotated)
        cos, sin = rotation
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin)
        query, key, value = (
            part.transpose(0, 1)[None]
            for part in (rotated[:, : self._heads], rotated[:, self._heads :], value)
        )
        output = packing.attend(
            self._attention, query, key, value, self._attention.scaling, self._window
        )
        return output[0].flatten(1)

    def _normalized(self, heads: Tensor) -> Tensor:
        """Query and key heads, each normalized; the weights differ, the epsilon does not."""
        result = rms_norm(heads, heads.shape[-1:], None, self._q_norm.variance_epsilon)
        result[:, : self._heads].mul_(self._q_norm.weight)
        result[:, self._heads :].mul_(self._k_norm.weight)
        return result


def _sliding_window(attention: Any) -> int | None:
    """Tokens that the layer sees; None for all. Only Mistral's layers do not carry it themselves."""
    mistral = attention.config.model_type == "mistral"
    window: int | None = getattr(attention.config if mistral else attention, "sliding_window", None)
    return window


class _Norm:
    """RMSNorm (arXiv 1910.07467), computed in fp32."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._epsilon: float = module.variance_epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, hidden.shape[-1:], self._module.weight, self._epsilon)


def _fused(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for all parts, whose own become views of it."""
    weight = _concatenated(parts, "weight")
    return weight, None if parts[0].bias is None else _concatenated(parts, "bias")


def _concatenated(parts: Sequence[nn.Linear], name: str) -> Tensor:
    tensors = [part.get_parameter(name) for part in parts]
    whole = torch.cat([tensor.detach() for tensor in tensors])
    views = torch.split(whole, [len(tensor) for tensor in tensors])
    for part, view in zip(parts, views, strict=True):
        part.register_parameter(name, nn.Parameter(view, requires_grad=False))
    return whole
