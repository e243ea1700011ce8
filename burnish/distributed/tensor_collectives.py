"""Differentiable collectives on tensors, among the ranks that share a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish.distributed.collectives import all_gather, reduce_scatter
from burnish.distributed.device import uncompiled


@uncompiled
def all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: send part r of `parts` [ranks, ...] to rank r; return the parts received."""

    def exchanged(sent: Tensor) -> Tensor:
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    return _linear(parts, exchanged, exchanged)


@uncompiled
def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """All-to-all of unequal parts: send the next `sent[r]` of `rows` [n, ...] to rank r; return the rows received, by rank.

    Backward sends gradients back.
    """

    def exchanged(own: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        others = own.new_empty(sum(here), *own.shape[1:])
        dist.all_to_all_single(others, own.contiguous(), list(here), list(there), group=group)
        return others

    return _linear(
        rows,
        partial(exchanged, there=sent, here=received),
        partial(exchanged, there=received, here=sent),
    )


@uncompiled
def all_gather_replicated(values: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather `values` [n, ...]: [ranks · n, ...]. Backward takes this rank's part of the gradient.

    All ranks must compute the same from the result.
    """
    part = slice(group.rank() * len(values), (group.rank() + 1) * len(values))
    return _linear(values, partial(_gathered, group=group), lambda gradient: gradient[part])


@uncompiled
def all_reduce_replicated(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of `values` over the ranks. Backward returns the gradient as it is.

    All ranks must compute the same from the result.
    """

    def added(own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    return _linear(values, added, lambda gradient: gradient)


@uncompiled
def all_gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather `rows` [n, ...]: [ranks · n, ...]. Backward sums the gradients of all ranks."""
    return _linear(rows, partial(_gathered, group=group), partial(_scattered, group=group))


@uncompiled
def reduce_scatter_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Reduce-scatter `rows` [ranks · n, ...]: each rank gets its n rows of the sum."""
    return _linear(rows, partial(_scattered, group=group), partial(_gathered, group=group))


Map = Callable[[Tensor], Tensor]


def _linear(values: Tensor, mapped: Map, transposed: Map) -> Tensor:
    return _Linear.apply(values, mapped, transposed)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear map over a group's ranks, whose backward pass is the transposed map."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mapped: Map, transposed: Map) -> Tensor:
        ctx.transposed = transposed
        return mapped(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradients[0]), None, None


def _gathered(rows: Tensor, group: ProcessGroup) -> Tensor:
    gathered = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    all_gather(gathered, rows.contiguous(), group=group)
    return gathered


def _scattered(rows: Tensor, group: ProcessGroup) -> Tensor:
    own = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    reduce_scatter(own, rows.contiguous(), group=group)
    return own
