"""Gradients on several ranks: their sum over tensor ranks, and their norm. FSDP2 sums over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_over(group: ProcessGroup, gradients: list[Tensor]) -> None:
    """Add up over the ranks of a group, in place, in one collective. They are of one dtype."""
    if not gradients:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined, group=group)
    parts = torch.split(joined, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def norm_over(
    groups: Iterable[ProcessGroup], gradients: Iterable[Tensor], device: torch.device
) -> Tensor:
    """2-norm of gradients of which each rank of these groups has other parts, fp32 scalar, on `device`. Collective."""
    squares = [_square(gradient) for gradient in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def _square(gradient: Tensor) -> Tensor:
    """Return the sum of squares, fp32, without a copy; by rows, since a whole matrix's norm is less exact on a CPU."""
    rows: Tensor = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)
    return rows.square_().sum()
