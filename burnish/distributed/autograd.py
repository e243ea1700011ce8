"""Collectives that a gradient goes back through, over the ranks that share a micro-batch.

Each is a linear map over the ranks of a group and its backward pass the transposed map, so that
gradients are those of one process that computes everything. Where every rank goes on to compute the
same thing from what it got (`join`), each has the whole gradient already and keeps its own part.
None is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 has given these another name, and warns at the one that earlier ones have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, which `torch.compile` leaves as it is where it is called by what is compiled."""
    left: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left


@uncompiled
def swap(parts: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: `parts` [ranks, ...] has one part for each rank; returns the parts from each rank, in the same shape."""
    result: Tensor = _Swap.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


@uncompiled
def join(values: Tensor, most: int, group: ProcessGroup) -> Tensor:
    """Every rank's `values` [n, ...], n ≤ `most`, on all ranks: [ranks · most, ...], each rank's from its multiple of `most` on.

    All ranks have to compute the same from the result: each takes the gradient of its own values alone.
    """
    result: Tensor = _Join.apply(values, most, group)  # type: ignore[no-untyped-call]
    return result


@uncompiled
def gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' `rows` [n, ...], by rank: [ranks · n, ...]. The gradients of all ranks add up."""
    result: Tensor = _GatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return result


@uncompiled
def scatter_sums(rows: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all ranks' `rows` [ranks · n, ...], of which each rank gets its n."""
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
