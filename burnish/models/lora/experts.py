"""Compute low-rank adapters of fused experts, with PEFT's parameters, by grouped products.

transformers keeps a layer's experts as one parameter [E, out, in]. PEFT gives it A [E r, in], expert after expert, and B [out, r E],
in which experts alternate. PEFT computes W + s B A in every forward pass. That doubles the experts' memory and replaces the tensor
that FSDP2 gathers. Here tokens go through A and B instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.distributed.device import uncompiled
from burnish.models.kernels.expert_rows import RowOrder
from burnish.models.lora.adapter_config import ADAPTER_NAME

_RANK_MULTIPLE = 8
"""Grouped products on CUDA need rows of a multiple of 16 bytes: 8 elements of 2 bytes."""
_PARAMETERS = ("gate_up_proj", "down_proj")


def expert_parameters(model: nn.Module) -> Iterator[str]:
    """Yield the names of fused experts' parameters that can be adapted."""
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        is_plain = (
            getattr(module, "has_gate", False)
            and not getattr(module, "has_bias", True)
            and not getattr(module, "is_transposed", True)
        )
        if is_plain and all(each in held for each in _PARAMETERS):
            yield from (f"{name}.{each}" for each in _PARAMETERS)


class AdaptedExperts(nn.Module):
    """A layer's adapted experts, with the parameters and names of PEFT's outermost ParamWrapper."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        self.base_layer = wrapper.base_layer
        self.lora_A = wrapper.lora_A
        self.lora_B = wrapper.lora_B
        self.parameter_name: str = wrapper.parameter_name
        """The experts' parameter that this layer's A and B change; a wrapper inside may change another."""
        self.scaling: dict[str, float] = dict(wrapper.scaling)
        """s, by the adapter's name, as in PEFT's layers; 0 turns the adapter off."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the outputs for tokens [T, H], each sent to k experts [T, k] and weighted [T, k]."""
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        layer: Any = self
        while hasattr(layer, "base_layer"):
            a, b = (factor[ADAPTER_NAME].weight for factor in (layer.lora_A, layer.lora_B))
            factors[layer.parameter_name] = a, b
            layer = layer.base_layer
        scale = self.scaling[ADAPTER_NAME]
        experts = layer
        if scale == 0.0:
            return experts(hidden_states, top_k_index, top_k_weights)
        return _adapted(experts, factors, scale, hidden_states, top_k_index, top_k_weights)


def _by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A [E, in, r'] and B [E, r', out] from PEFT's; r' is the padded rank."""
    rank = len(a) // experts
    narrow = a.view(experts, rank, -1).transpose(1, 2)
    wide = b.view(len(b), rank, experts).permute(2, 1, 0)
    if rest := -rank % _RANK_MULTIPLE:
        narrow = functional.pad(narrow, (0, rest))
        wide = functional.pad(wide, (0, 0, 0, rest))
    return narrow, wide.contiguous()


@uncompiled
def _adapted(
    experts: Any,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    scale: float,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    order = RowOrder(chosen)
    ends = order.ends(experts.num_experts)

    def product(rows: Tensor, name: str) -> Tensor:
        result = functional.grouped_mm(rows, getattr(experts, name).transpose(1, 2), offs=ends)
        if name not in factors:
            return result
        a, b = _by_expert(*factors[name], experts.num_experts)
        narrow = functional.grouped_mm(rows, a, offs=ends)
        added = functional.grouped_mm(narrow, b, offs=ends)
        return torch.add(result, added, alpha=scale)

    inner = experts._apply_gate(product(order.spread(hidden), "gate_up_proj"))
    return order.weighted(product(inner, "down_proj"), weights).to(hidden.dtype)
