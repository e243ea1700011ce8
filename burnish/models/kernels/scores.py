"""Soft caps and softmax of attention's scores, in place."""

from __future__ import annotations

import torch
from torch import Tensor


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Bound scores in place, as `Softmax.softcap` says."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def weigh(scores: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Write the softmax of fp32 scores [..., keys] and `sinks` [..., 1] over the scores, and return the sinks' weights."""
    if sinks is None:
        torch.softmax(scores, -1, out=scores)
        return None
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    of_sinks = (sinks - top).exp_()
    of_keys = scores.sub_(top).exp_()
    total = of_keys.sum(-1, keepdim=True).add_(of_sinks)
    of_keys.div_(total)
    return of_sinks.div_(total)
