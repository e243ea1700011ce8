"""An engine's statistics of a step: loss, gradient norm, and whether it was skipped.

A step with non-finite gradients is skipped; too many in a row end the run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.distributed.collectives import reduce_stats
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.tracking.stats import Mean, Stats, Sum


def loss_stats(
    stats: Stats, loss: Tensor, aux_loss: Tensor | None, layout: Layout, device: torch.device
) -> Stats:
    """Return the statistics of all ranks with `loss`, and `moe/aux_loss` if there is one. Collective.

    Both are 0-d, this rank's parts of sums over the global batch.
    """
    sums = {"loss": Sum(loss)}
    if aux_loss is not None:
        sums["moe/aux_loss"] = Sum(aux_loss)
    reduced = reduce_stats(Stats(stats | sums), layout, device)
    return Stats(reduced | {name: Mean(reduced[name].value(), 1.0) for name in sums})


def optimizer_stats(norm: float, lr: float) -> Stats:
    """Of a step at this learning rate whose gradients, before clipping, had this 2-norm."""
    return Stats(
        grad_norm=Mean(norm, 1.0),
        lr=Mean(lr, 1.0),
        skipped=Sum(0.0 if math.isfinite(norm) else 1.0),
    )


def skipped_in_a_row(before: int, norm: float, most: int) -> int:
    """Return the number of skipped steps in a row after one with this gradient norm. Raises `BurnishError` at `most`."""
    skipped = 0 if math.isfinite(norm) else before + 1
    if skipped >= most:
        raise BurnishError(
            f"training diverged: the gradient norm was not finite in {skipped} steps in a row",
            have=f"gradient norm {norm}",
            want="a finite norm",
            do="lower optim.lr, or start from an earlier checkpoint; "
            "engine.max_skipped_steps sets how many are borne",
        )
    return skipped
