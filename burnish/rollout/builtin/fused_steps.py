"""Run a step of a Llama-shaped family with nine kernels a layer.

A product adds its result to the residual stream. One kernel norms and rotates queries and keys, and writes keys and values to the
cache. One applies the gate. Numbers are those of `FusedForward`, rounded less often.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from burnish.models.kernels.attention import Softmax
from burnish.models.kernels.fused import rotation_of
from burnish.rollout.builtin.forward import FusedBlock, FusedForward, FusedLinear
from burnish.rollout.builtin.paged_cache import PagedCache

Rotation = tuple[Tensor, Tensor]


class FusedSteps:
    """See `InferenceModel.forward`; each sequence has one token."""

    def __init__(self, forward: FusedForward, kernels: Any = None) -> None:
        """`kernels` is `burnish.models.kernels.triton_decoding` unless given."""
        if kernels is None:
            from burnish.models.kernels import triton_decoding as kernels
        self._kernels = kernels
        self._forward = forward

    def __call__(
        self, token_ids: Tensor, positions: Tensor, cache: PagedCache, routing: Any
    ) -> Tensor:
        """See `InferenceModel.forward`."""
        forward = self._forward
        hidden: Tensor = forward.embed(token_ids)
        rotation = rotation_of(*forward.rotary(hidden[None], positions[None]))
        for block in forward.blocks:
            attended = self._attend(block, block.norm(hidden), rotation, cache)
            hidden = _added(block.out, attended, hidden)
            gated = self._gate(block, block.gate_up(block.mlp_norm(hidden)))
            hidden = _added(block.down, gated, hidden)
        return forward.norm(hidden)

    def _attend(
        self, block: FusedBlock, hidden: Tensor, rotation: Rotation, cache: PagedCache
    ) -> Tensor:
        attention = block.attention
        joined = block.qkv(hidden).view(len(hidden), -1, attention.head_dim)
        of_query = attention.q_norm
        of_key = attention.k_norm
        weights = None
        epsilon = 0.0
        if of_query is not None and of_key is not None:
            weights = (of_query.weight, of_key.weight)
            epsilon = of_query.variance_epsilon
        layer = attention.layer_idx
        query = self._kernels.rotate_and_write(
            joined, weights, epsilon, rotation, cache.places, cache.pools(layer)
        )
        softmax = Softmax(attention.scaling, attention.sliding_window)
        return cache.attend_to_blocks(layer, query, softmax).flatten(1)

    def _gate(self, block: FusedBlock, joined: Tensor) -> Tensor:
        if isinstance(block.act, nn.SiLU | SiLUActivation):
            gated: Tensor = self._kernels.silu_gate(joined)
            return gated
        gate, up = joined.chunk(2, dim=-1)
        return block.act(gate).mul_(up)


def _added(product: FusedLinear, rows: Tensor, residual: Tensor) -> Tensor:
    """Return residual + product(rows)."""
    if product.is_plain:
        return torch.addmm(residual, rows, product.weight.t())
    return product(rows).add_(residual)
