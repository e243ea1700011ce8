"""Compute a layer's fused experts by grouped products, without sorting in the backward pass.

transformers gathers the rows of tokens by a permutation, and autograd would sort its indices again to add up their gradients. Here the
inverse permutation is known, so the backward pass gathers, too. Results are those of transformers' `grouped_mm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

GROUPED = "grouped_mm"
"""transformers' name of its grouped products."""
UNSORTED = "burnish_grouped"
"""The name under which transformers finds `unsorted_experts`."""


class RowOrder:
    """The order of rows, one for each of the k choices of T tokens, by expert; ties in the order of tokens."""

    def __init__(self, chosen: Tensor) -> None:
        """Order the experts [T, k] that tokens go to."""
        self.choices = chosen.shape[1]
        self.experts, self._order = chosen.flatten().sort(stable=True)
        """[T k]: the rows' experts, ascending."""
        self._inverse = torch.empty_like(self._order)
        self._inverse[self._order] = torch.arange(len(self._order), device=chosen.device)

    def ends(self, experts: int) -> Tensor:
        """Return [experts] int32: where the rows of each expert end. The host does not wait."""
        numbers = torch.arange(experts, device=self.experts.device, dtype=self.experts.dtype)
        return torch.searchsorted(self.experts, numbers, right=True, out_int32=True)

    def spread(self, tokens: Tensor) -> Tensor:
        """Return the rows [T k, H] of tokens [T, H]."""
        args = tokens, self._order, self._inverse, self.choices
        return _Spread.apply(*args)  # type: ignore[no-untyped-call]

    def by_token(self, rows: Tensor) -> Tensor:
        """Return rows [T k, H] as [T, k, H]."""
        ordered = _Reordered.apply(rows, self._inverse, self._order)  # type: ignore[no-untyped-call]
        return ordered.view(-1, self.choices, rows.shape[1])

    def weighted(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sums [T, H] of rows [T k, H], times weights [T, k]."""
        # Gather and sum, because concurrent additions in place would run in any order.
        return (self.by_token(rows) * weights[..., None]).sum(1)


def unsorted_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the outputs for tokens [T, H], each sent to k experts [T, k] and weighted [T, k]."""
    order = RowOrder(chosen)
    ends = order.ends(experts.num_experts)

    def product(rows: Tensor, name: str) -> Tensor:
        bias = getattr(experts, f"{name}_bias")[order.experts] if experts.has_bias else None
        weight = getattr(experts, name)
        return _grouped_linear(rows, weight, ends, bias=bias, is_transposed=experts.is_transposed)

    inner = product(order.spread(hidden), "gate_up_proj" if experts.has_gate else "up_proj")
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return order.weighted(product(inner, "down_proj"), weights).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(UNSORTED, unsorted_experts)


def has_experts(module: nn.Module) -> bool:
    """Return whether transformers computes the experts of this module together."""
    return hasattr(module, "is_transposed") and hasattr(module, "num_experts")


def use_unsorted_experts(model: PreTrainedModel) -> None:
    """Have a model compute its experts here, where transformers would by grouped products."""
    for module in model.modules():
        if has_experts(module) and module.config._experts_implementation == GROUPED:
            module.config._experts_implementation = UNSORTED


class _Spread(torch.autograd.Function):
    """Return rows [T k, H] in an order of choices from those [T, H] of tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        by_choice = gradients[0].index_select(0, ctx.saved_tensors[0])
        return by_choice.view(-1, ctx.choices, by_choice.shape[1]).sum(1), None, None, None


class _Reordered(torch.autograd.Function):
    """Return rows in an order, of which `inverse` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None
