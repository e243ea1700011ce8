"""What the critic minimises. Left out: how tokens are added up (`burnish.algorithms.aggregation`)."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.aggregation import AggregationKind, aggregation
from burnish.algorithms.loss import Loss
from burnish.errors import BurnishError
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats


def value_loss_fn(kind: AggregationKind, clip: float | None, max_response_length: int) -> Loss:
    """PPO's value loss, clipped as in the authors' code (github.com/openai/baselines, ppo2; arXiv 2005.12729, section 3).

        ℓ_t = ½ max( (V_t - R_t)²,  (clip(V_t, V_old,t - `clip`, V_old,t + `clip`) - R_t)² )

    Without `clip` it is ½ (V_t - R_t)². Aggregated like the policy's loss, `max_response_length` in
    tokens being sequence_sum_fixed's divisor. Statistics, each a mean that merges: `vf_loss`, the
    loss; `vf_clipfrac`, the share of tokens that the clip holds back.

    The loss raises `BurnishError` for a micro-batch without returns, or without old values where it clips.
    """

    def value_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        aggregate = aggregation(kind, micro, max_response_length)
        mask = micro.loss_mask
        returns = torch.where(mask, _given(micro.returns, "returns"), 0.0)
        values = torch.where(mask, outputs.values, 0.0)
        losses = (values - returns).square() / 2
        held = torch.zeros_like(mask)
        if clip is not None:
            old = torch.where(mask, _given(micro.old_values, "old_values"), 0.0)
            moved = values - old
            clipped = (old + moved.clamp(-clip, clip) - returns).square() / 2
            held = (moved.abs() > clip) & (clipped > losses)  # and not by rounding
            losses = torch.maximum(losses, clipped)
        loss = aggregate(losses)
        return loss, Stats(
            vf_loss=aggregate.mean_of(loss), vf_clipfrac=Mean((held & mask).sum(), mask.sum())
        )

    return value_loss


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise BurnishError(
            f"A value loss was given a micro-batch without {name}.",
            have=f"{name}=None",
            want="one fp32 number per token",
            do="make the examples of the batch with returns and old_values",
        )
    return tensor
