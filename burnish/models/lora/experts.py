"""Low-rank adapters on fused experts: PEFT's parameters, computed by grouped products.

transformers keeps a layer's experts as one parameter [E, out, in]. PEFT's ParamWrapper gives it A [E r, in], expert after expert, and
B [out, r E], in which experts alternate, and computes all of W + s B A in every forward pass. That takes the experts' memory twice,
and replaces the tensor that FSDP2 gathers. Here tokens go through A and B by grouped products, so W is only read. Names, shapes and
files are PEFT's. Left out: experts with biases, without a gate, or laid out [E, in, out]; dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.distributed.collectives import uncompiled

_RANK_MULTIPLE = 8
"""Grouped products on CUDA want rows of a multiple of 16 bytes, which are so many elements at least."""
_PARAMETERS = ("gate_up_proj", "down_proj")


def expert_parameters(model: nn.Module) -> Iterator[str]:
    """Names of the parameters with the experts of a layer that can be adapted."""
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        if all(each in held for each in _PARAMETERS) and _is_plain(module):
            yield from (f"{name}.{each}" for each in _PARAMETERS)


def _is_plain(experts: Any) -> bool:
    return (
        getattr(experts, "has_gate", False)
        and not getattr(experts, "has_bias", True)
        and not getattr(experts, "is_transposed", True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    """What is added to the weights of all experts, as grouped products take it."""

    a: Tensor
    """[E, in, r']: r' is the rank, rounded up with columns of 0."""
    b: Tensor
    """[E, r', out]."""

    @classmethod
    def of(cls, a: Tensor, b: Tensor, experts: int) -> _Factors:
        """From PEFT's A [E r, in] and B [out, r E]."""
        rank = len(a) // experts
        narrow = a.view(experts, rank, -1).transpose(1, 2)
        wide = b.view(len(b), rank, experts).permute(2, 1, 0)
        if rest := -rank % _RANK_MULTIPLE:
            narrow = functional.pad(narrow, (0, rest))
            wide = functional.pad(wide, (0, 0, 0, rest))
        return cls(narrow, wide.contiguous())

    def of_rows(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return B A x for rows [N, in] sorted by expert; those of expert e end at `ends[e]`."""
        narrow = functional.grouped_mm(rows, self.a, offs=ends)
        return functional.grouped_mm(narrow, self.b, offs=ends)


class AdaptedExperts(nn.Module):
    """A layer's experts with an adapter, in place of PEFT's outermost ParamWrapper, with its parameters and names."""

    def __init__(self, wrapper: Any, adapter: str) -> None:
        """`adapter`: PEFT's name of it."""
        super().__init__()
        self.base_layer = wrapper.base_layer
        self.lora_A = wrapper.lora_A
        self.lora_B = wrapper.lora_B
        self.parameter_name: str = wrapper.parameter_name
        """The parameter of the experts that this layer's A and B are for; another may have those of a wrapper within."""
        self.scaling: dict[str, float] = dict(wrapper.scaling)
        """s, by the adapter's name, as PEFT's layers have it; with 0 the adapter is off."""
        self._adapter = adapter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' outputs for tokens [T, H], each sent to k experts [T, k] and weighted [T, k]."""
        scale = self.scaling[self._adapter]
        if scale == 0.0:
            result: Tensor = self._experts(hidden_states, top_k_index, top_k_weights)
            return result
        return _adapted(
            self._experts, self._factors(), scale, hidden_states, top_k_index, top_k_weights
        )

    @property
    def _experts(self) -> Any:
        layer: Any = self
        while hasattr(layer, "base_layer"):
            layer = layer.base_layer
        return layer

    def _factors(self) -> dict[str, _Factors]:
        """By the name of the parameter."""
        found, layer, count = {}, self, self._experts.num_experts
        while hasattr(layer, "base_layer"):
            a, b = (factor[self._adapter].weight for factor in (layer.lora_A, layer.lora_B))
            found[layer.parameter_name] = _Factors.of(a, b, count)
            layer = layer.base_layer
        return found


@uncompiled
def _adapted(
    experts: Any,
    factors: dict[str, _Factors],
    scale: float,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """transformers' grouped experts, with s B A x beside every W x."""
    ranked, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts.num_experts, device=ranked.device, dtype=ranked.dtype)
    ends = torch.searchsorted(ranked, numbers, right=True, out_int32=True)

    def product(rows: Tensor, name: str) -> Tensor:
        result = functional.grouped_mm(rows, getattr(experts, name).transpose(1, 2), offs=ends)
        if name not in factors:
            return result
        return torch.add(result, factors[name].of_rows(rows, ends), alpha=scale)

    inner = experts._apply_gate(product(hidden[order // chosen.shape[1]], "gate_up_proj"))
    outputs = product(inner, "down_proj") * weights.flatten()[order, None]
    # Gathered and summed, not added in place, so that no two additions race.
    return outputs[order.argsort()].view(*chosen.shape, -1).sum(1).to(hidden.dtype)
