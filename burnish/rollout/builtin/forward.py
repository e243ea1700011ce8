"""Compute the model's forward pass for generation: token ids in, last hidden states out.

`FusedForward` runs Llama-shaped families with one product for queries, keys and values, and one for
gate and up: small batches spend their time between products. Other families run through their own
modules. An adapter is never merged: y = W x + b + s B A x. Left out: CUDA graphs, compilation,
fused experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from burnish.distributed.device import has_bf16_products
from burnish.models.kernels.attention import Attends
from burnish.models.kernels.fused import (
    FusedAttention,
    FusedRMSNorm,
    norm_rotate,
    rotate,
    rotation_of,
)
from burnish.models.routing import Routers, Routing


def forward_of(model: PreTrainedModel) -> FusedForward | ModuleForward:
    """Return the fastest forward that is right for this model.

    Some weights become views of fused ones, so take the model's shards afterwards.
    """
    return FusedForward(model) if _is_plain(model) else ModuleForward(model)


def _is_plain(model: PreTrainedModel) -> bool:
    layers: Any = getattr(model.base_model, "layers", ())
    return len(layers) > 0 and all(
        isinstance(getattr(layer, "self_attn", None), FusedAttention)
        and hasattr(layer.mlp, "gate_proj")
        for layer in layers
    )


class ModuleForward:
    """Run any model through its own modules."""

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
        """Return hidden states [T, hidden] of `token_ids` [T] at `positions` [T].

        `routing` records the experts.
        """
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
        """Do nothing: the modules read their weights each time."""


class FusedForward:
    """Run pre-norm blocks of grouped attention with rotary positions and a gated MLP."""

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
        """See `ModuleForward`; these models have no experts."""
        hidden: Tensor = self._embed(token_ids)
        rotation = rotation_of(*self._rotary(hidden[None], positions[None]))
        for block in self._blocks:
            hidden = block(hidden, rotation, packing)
        final: Tensor = self._norm(hidden)
        return final

    def refresh(self) -> None:
        """Re-read the weights after they changed; adapters need no refresh."""
        for block in self._blocks:
            for projection in block.linears:
                projection.refresh()


class _Block:
    def __init__(self, layer: Any) -> None:
        attention: FusedAttention = layer.self_attn
        mlp, self._attention = layer.mlp, attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads, self._kv_heads = (
            part.out_features // attention.head_dim for part in projections[:2]
        )
        self._head_dim: int = attention.head_dim
        self._qkv, self._out = FusedLinear(*projections), FusedLinear(attention.o_proj)
        self._gate_up, self._down = (
            FusedLinear(mlp.gate_proj, mlp.up_proj),
            FusedLinear(mlp.down_proj),
        )
        self.linears = (self._qkv, self._out, self._gate_up, self._down)
        self._act = mlp.act_fn
        self._norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: Attends) -> Tensor:
        attended = self._attend(self._norm(hidden), rotation, packing)
        hidden = hidden + self._out(attended)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._act(gate).mul_(up))

    def _attend(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: Attends) -> Tensor:
        """Return attention of [T, hidden] before its output projection, [T, heads · head_dim]."""
        qkv = self._qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotating, value = torch.split(qkv, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        rotating = self._rotated(rotating, rotation)
        parts = (rotating[:, : self._heads], rotating[:, self._heads :], value)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        layer, scaling = self._attention.layer_idx, self._attention.scaling
        window = self._attention.sliding_window
        output = packing.attend(layer, (query, key, value), scaling, window)
        return output[0].flatten(1)

    def _rotated(self, heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate query and key heads in one step, after the model's norms."""
        query, key = self._attention.q_norm, self._attention.k_norm
        if query is None or key is None:
            return rotate(heads, rotation)
        weights = torch.cat(
            (query.weight.expand(self._heads, -1), key.weight.expand(self._kv_heads, -1))
        )
        return norm_rotate(heads, weights, query.variance_epsilon, rotation)


class FusedLinear:
    """Compute linear layers that read the same rows, with their adapters, as one product."""

    def __init__(self, *layers: Any) -> None:
        """Turn the weights, biases and A of the layers, perhaps PEFT's, into views of joined ones."""
        plain: list[nn.Linear] = [getattr(layer, "base_layer", layer) for layer in layers]
        bias = None if plain[0].bias is None else _concatenated(plain, "bias")
        self._linear = PackedLinear(_concatenated(plain, "weight"), bias)
        columns = _ranges([part.out_features for part in plain])
        own = [(c, x) for c, x in zip(columns, layers, strict=True) if hasattr(x, "lora_A")]
        factors: list[nn.Linear] = [layer.lora_A["default"] for _, layer in own]
        self._a = _concatenated(factors, "weight") if own else None
        ranks = _ranges([a.out_features for a in factors])
        self._wide = [
            (columns, rows, layer.lora_B["default"].weight, float(layer.scaling["default"]))
            for (columns, layer), rows in zip(own, ranks, strict=True)
        ]

    def refresh(self) -> None:
        """Re-read the layers' own weights. Adapters may change without it."""
        self._linear.refresh()

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [n, sum of out] for `rows` [n, in], in new memory."""
        result = self._linear(rows)
        if self._a is not None:
            narrow = linear(rows, self._a)
            for columns, ranks, b, scale in self._wide:
                result[:, columns].addmm_(narrow[:, ranks], b.t(), alpha=scale)
        return result


def _concatenated(layers: Sequence[nn.Linear], name: str) -> Tensor:
    """Join the layers' weights (or biases); theirs become views of the result."""
    tensors = [part.get_parameter(name).detach() for part in layers]
    whole = torch.cat(tensors)
    views = torch.split(whole, [len(tensor) for tensor in tensors])
    for part, view in zip(layers, views, strict=True):
        part.register_parameter(name, nn.Parameter(view, requires_grad=False))
    return whole


def _ranges(sizes: Sequence[int]) -> list[slice]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


class PackedLinear:
    """Compute `x W.T + b` from a weight kept in the order that the CPU's bf16 units read.

    Otherwise each product of a small batch takes twice as long. Results are bitwise equal; the
    weight is in memory twice. Accelerators and fp32 read the weight as it is. Call `refresh` after
    the weight changes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Hold `weight` [out, in] and `bias` [out] without copying."""
        self._weight, self._bias = weight, bias
        self._ordered: Tensor | None = None

    def refresh(self) -> None:
        """Reorder the weight if the device's bf16 units want it."""
        weight = self._weight
        is_bf16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if is_bf16 and has_bf16_products(weight.device):
            self._ordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product [n, out] of `rows` [n, in]."""
        if self._ordered is None:
            return linear(rows, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._ordered, self._bias, "none", [], ""
        )
        return product
