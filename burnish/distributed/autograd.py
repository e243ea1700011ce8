"""Differentiable collectives over the ranks that share a micro-batch.

Each is a linear map over a group's ranks, and its backward pass is the transposed map. So gradients
equal those of one process that computes everything. None is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed these and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep `torch.compile` out of a function."""
    left: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left


@uncompiled
def swap(parts: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: send part r of `parts` [ranks, ...] to rank r; return one part from each rank, same shape."""
    result: Tensor = _Swap.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


@uncompiled
def join(values: Tensor, most: int, group: ProcessGroup) -> Tensor:
    """All-gather `values` [n, ...], n ≤ `most`: [ranks · most, ...], rank r's from row r · most on.

    All ranks must compute the same from the result, because each keeps the gradient of its own part only.
    """
    result: Tensor = _Join.apply(values, most, group)  # type: ignore[no-untyped-call]
    return result


@uncompiled
def gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather `rows` [n, ...]: [ranks · n, ...]. Backward sums the gradients of all ranks."""
    result: Tensor = _GatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return result


@uncompiled
def scatter_sums(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Reduce-scatter `rows` [ranks · n, ...]: each rank gets its n rows of the sum."""
    result: Tensor = _ScatterSums.apply(rows, group)  # type: ignore[no-untyped-call]
    return result


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(parts: Tensor, group: ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, most: int, group: ProcessGroup) -> Tensor:
        start = group.rank() * most
        ctx.own = slice(start, start + len(values))
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        return _gathered(padded, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own], None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradients[0], ctx.group), None


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


def _gathered(rows: Tensor, group: ProcessGroup) -> Tensor:
    gathered = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    _all_gather(gathered, rows.contiguous(), group=group)
    return gathered


def _scattered(rows: Tensor, group: ProcessGroup) -> Tensor:
    own = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    _reduce_scatter(own, rows.contiguous(), group=group)
    return own
