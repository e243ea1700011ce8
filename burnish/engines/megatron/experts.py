"""The experts of a mixture as two grouped products, for Megatron's layer spec.

Megatron's grouped experts need CUDA packages; else it runs one expert at a time. Here a rank's experts are one parameter each,
and every expert's rows are multiplied in one call. Ranks that share an expert exchange rows in Megatron's token dispatcher. Left
out: biases, activations other than SiLU, quantized experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_ALIGNED_BYTES = 16
"""Grouped products want rows and columns to begin at multiples of it."""


class GroupedExperts(MegatronModule):
    """This rank's experts [E] of a layer, each a gated MLP or this rank's part of one."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        experts, hidden, dtype = num_local_experts, config.hidden_size, config.params_dtype
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.linear_fc1 = GroupedLinear((experts, 2 * width, hidden), dtype)
        self.linear_fc2 = GroupedLinear((experts, hidden, width), dtype)

    def forward(self, rows: Tensor, counts: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Return [R, H] of rows [R, H], sorted by expert and multiplied by the router's probabilities [R]; no bias.

        `counts` [E] int64: rows of each expert.
        """
        gate, up = self.linear_fc1(rows, counts).chunk(2, dim=-1)
        inner = functional.silu(gate) * up * probabilities[:, None]
        return self.linear_fc2(inner.to(rows.dtype), counts), None


class GroupedLinear(nn.Module):
    """A matrix [O, I] for each expert, in one undefined parameter [E, O, I]; no bias."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [R, O] of rows [R, I]: the first `counts[0]` belong to the first expert, and so on."""
        product: Tensor = _GroupedProduct.apply(rows, self.weight, counts)  # type: ignore[no-untyped-call]
        return product


class _GroupedProduct(torch.autograd.Function):
    """rows · weightᵀ for each expert; the weight's gradient goes to its `main_grad`, where Megatron has one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.main_grad = getattr(weight, "main_grad", None)
        return grouped_product(rows, weight.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight, counts = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_product(gradient, weight, counts)
        if ctx.main_grad is not None:
            add_outer_products(ctx.main_grad, gradient, rows, counts)
            return of_rows, None, None
        of_weight = torch.zeros_like(weight)
        add_outer_products(of_weight, gradient, rows, counts)
        return of_rows, of_weight, None


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return [R, O] of rows [R, I] and matrices [E, I, O]: the first `counts[0]` rows times the first matrix, and so on."""
    if _is_aligned(rows, matrices[0]):
        return functional.grouped_mm(rows, matrices, offs=_ends(counts, rows.device))
    each = zip(torch.split(rows, counts.tolist()), matrices, strict=True)
    return torch.cat([own @ matrix for own, matrix in each])


def add_outer_products(sums: Tensor, left: Tensor, right: Tensor, counts: Tensor) -> None:
    """Add leftᵀ · right of each expert's rows, [R, O] and [R, I], to sums [E, O, I]; on a host one expert after the other."""
    if left.is_cuda and _is_aligned(left, right):
        sums.add_(functional.grouped_mm(left.t(), right, offs=_ends(counts, left.device)))
        return
    sizes = counts.tolist()
    pairs = zip(torch.split(left, sizes), torch.split(right, sizes), strict=True)
    for total, (ours, theirs) in zip(sums, pairs, strict=True):
        total.add_(ours.t() @ theirs)


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    """Where each expert's rows end, as grouped products take it."""
    return counts.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _is_aligned(*factors: Tensor) -> bool:
    """Whether matrices, none of them empty, can be taken by a grouped product."""
    return all(
        matrix.numel() > 0 and size * matrix.element_size() % _ALIGNED_BYTES == 0
        for matrix in factors
        for size in matrix.shape[1:]
    )
