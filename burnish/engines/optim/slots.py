"""Memory of an optimizer's slots."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.distributed.host_memory import Arena


def zero_slot(tensor: Tensor, arena: Arena | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros in the shape of a tensor, on its device or in the arena."""
    if arena is None:
        return torch.zeros_like(tensor, dtype=dtype)
    return arena.take(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape).zero_()
