"""Tokens in, last hidden states out: through the model's own modules, or through fewer and larger steps.

A decoding step of a small batch spends its time between the matrix products. For the plain
Llama-shaped families `FusedForward` computes the same from the same weights with one product for
queries, keys and values and one for gate and up. Every other family runs through `ModuleForward`,
transformers' own code. The tests hold both equal. Left out: CUDA graphs and compilation.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.models.kernels.attention import Attends
from burnish.models.kernels.fused import (
    FusedAttention,
    FusedRMSNorm,
    norm_rotate,
    rotate,
    rotation_of,
)
from burnish.models.routing import Routers, Routing
from burnish.rollout.builtin.joined import Joined


class Forward(Protocol):
    """The model up to its output layer."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        packing: Attends,
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of `token_ids` [T] at `positions` [T]; `routing` is told which experts they went to."""

    def refresh(self) -> None:
        """Take note that the model's weights have changed, other than those of an adapter."""


def forward_of(model: PreTrainedModel) -> Forward:
    """The fastest forward that is known to be right for this model.

    May give weights new memory (views of fused ones), so take shards of the model afterwards.
    """
    return FusedForward(model) if _is_plain(model) else ModuleForward(model)


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether every layer is attention that `fuse` has replaced and a gated MLP."""
    layers: Any = getattr(model.base_model, "layers", ())
    return len(layers) > 0 and all(
        isinstance(getattr(layer, "self_attn", None), FusedAttention)
        and hasattr(layer.mlp, "gate_proj")
        for layer in layers
    )


class ModuleForward:
    """Any model, by its own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.base_model
        self._routers = Routers(model)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        packing: Attends,
        routing: Routing | None = None,
    ) -> Tensor:
        """See `Forward`."""
        if routing is not None:
            self._routers.listen()
        hidden: Tensor = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            packing=packing,
            routing=routing,
        ).last_hidden_state[0]
        return hidden

    def refresh(self) -> None:
        """See `Forward`; the modules read their weights each time."""


class FusedForward:
    """Pre-norm blocks of grouped attention with rotary positions and a gated MLP."""

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self._embed = base.embed_tokens
        self._rotary = base.rotary_emb
        self._blocks = [_Block(layer) for layer in base.layers]
        self._norm: FusedRMSNorm = base.norm

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        packing: Attends,
        routing: Routing | None = None,
    ) -> Tensor:
        """See `Forward`; there are no experts."""
        hidden: Tensor = self._embed(token_ids)
        rotation = rotation_of(*self._rotary(hidden[None], positions[None]))
        for block in self._blocks:
            hidden = block(hidden, rotation, packing)
        final: Tensor = self._norm(hidden)
        return final

    def refresh(self) -> None:
        """See `Forward`."""
        for block in self._blocks:
            for product in block.products:
                product.refresh()


class _Block:
    def __init__(self, layer: Any) -> None:
        attention: FusedAttention = layer.self_attn
        mlp, self._attention = layer.mlp, attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads, self._kv_heads = (
            part.out_features // attention.head_dim for part in projections[:2]
        )
        self._head_dim: int = attention.head_dim
        self._qkv, self._out = Joined(*projections), Joined(attention.o_proj)
        self._gate_up, self._down = Joined(mlp.gate_proj, mlp.up_proj), Joined(mlp.down_proj)
        self.products = (self._qkv, self._out, self._gate_up, self._down)
        self._act = mlp.act_fn
        self._norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: Attends) -> Tensor:
        attended = self._attend(self._norm(hidden), rotation, packing)
        hidden = hidden + self._out(attended)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._act(gate).mul_(up))

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: Attends) -> Tensor:
        """Attention of [T, hidden], before its output projection: [T, heads · head_dim]."""
        qkv = self._qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotating, value = torch.split(qkv, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        rotating = self._rotated(rotating, rotation)
        parts = (rotating[:, : self._heads], rotating[:, self._heads :], value)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        attention = self._attention
        output = packing.attend(
            attention, query, key, value, attention.scaling, attention.sliding_window
        )
        return output[0].flatten(1)

    def _rotated(self, heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Query and key heads in one step, each with its own norm where there is one."""
        query, key = self._attention.q_norm, self._attention.k_norm
        if query is None or key is None:
            return rotate(heads, rotation)
        weights = torch.cat(
            (query.weight.expand(self._heads, -1), key.weight.expand(self._kv_heads, -1))
        )
        return norm_rotate(heads, weights, query.variance_epsilon, rotation)
