"""The loss functions that trainers hand to an engine.

Each is pure, sees one micro-batch, and never waits for the device. It returns its part of the
step's loss, and statistics that add up over micro-batches and ranks. The trainer prefixes the
statistics' names (`actor/`, `critic/`, `train/`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.kl import kl_loss
from burnish.algorithms.mismatch import mismatch_stats, mismatch_weights
from burnish.algorithms.policy_loss import (
    TokenLosses,
    load_policy_loss,
    log_ratio,
    old_logprobs,
)
from burnish.config.schema import AggregationKind, AlgorithmConfig
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats, Sum

Loss = Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]
"""What an engine runs on each micro-batch (`burnish.engines.base.LossFn`)."""


def sft_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """Return -Σ_t m_t log π(y_t) / (loss tokens of the global batch), and `tokens`, their number."""
    mean = aggregation("token_mean", micro, 1)
    loss = mean(-outputs.logprobs.float())
    return loss, Stats({"tokens": Sum(mean.local_units)})


def policy_loss_fn(config: AlgorithmConfig, max_response_length: int) -> Loss:
    """Return the loss of `config`: surrogate, plus `kl.coef` · KL if used, less `entropy_coef` · H.

    All three are aggregated alike. The entropy bonus needs `TokenOutputs.entropy` with a gradient.
    Statistics, each a mean:

    - `pg_loss`, `kl_loss`: the terms as they enter the loss
    - `entropy`: nats per token
    - `ppo_kl`: mean of log π_old/π per token
    - `pg_clipfrac`, `pg_clipfrac_lower`: share of tokens held by the clip range, by the dual clip
    - `mismatch_...`: see `burnish.algorithms.mismatch`; if the generator's log-probs are there

    The mismatch correction multiplies each token's policy loss, and no other term. The loss raises
    `BurnishError` for a micro-batch without advantages or needed reference or sampled log-probs.
    """
    kl_in_loss = config.kl.coef > 0 and config.kl.place == "loss"
    surrogate = load_policy_loss(config)

    def policy_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        aggregate = aggregation(config.aggregation, micro, max_response_length)
        tokens = surrogate(outputs.logprobs, micro)
        old = old_logprobs(outputs.logprobs, micro)
        stats = Stats(_statistics(tokens, outputs, micro) | mismatch_stats(old, micro))
        losses = tokens.loss
        if config.top_entropy is not None and micro.selected is not None:
            losses = torch.where(micro.selected, losses, 0.0)
        if config.mismatch_cap is not None or config.mismatch_reject != "none":
            weights, held = mismatch_weights(old, micro, config)
            losses = losses * weights
            stats |= held
        loss = aggregate(losses)
        stats["pg_loss"] = aggregate.mean_of(loss)
        if kl_in_loss:
            divergence = aggregate(
                kl_loss(
                    config.kl.estimator,
                    outputs.logprobs,
                    micro.given("ref_logprobs"),
                    micro.loss_mask,
                )
            )
            loss = loss + config.kl.coef * divergence
            stats["kl_loss"] = aggregate.mean_of(divergence)
        if config.entropy_coef != 0:
            loss = loss - config.entropy_coef * aggregate(outputs.entropy)
        return loss, stats

    return policy_loss


def _statistics(tokens: TokenLosses, outputs: TokenOutputs, micro: MicroBatch) -> Stats:
    mask = micro.loss_mask
    count = mask.sum()

    def mean(values: Tensor | None) -> Mean:
        if values is None:
            return Mean(0.0, count)
        return Mean(torch.where(mask, values.detach().float(), 0.0).sum(), count)

    return Stats(
        {
            "entropy": mean(outputs.entropy),
            "ppo_kl": mean(-log_ratio(outputs.logprobs, micro)),
            "pg_clipfrac": mean(tokens.clipped),
            "pg_clipfrac_lower": mean(tokens.clipped_lower),
        }
    )


def value_loss_fn(kind: AggregationKind, clip: float | None, max_response_length: int) -> Loss:
    """Return PPO's value loss, clipped as in OpenAI's ppo2 (arXiv 2005.12729, section 3).

        ℓ_t = ½ max( (V_t - R_t)²,  (clip(V_t, V_old,t - `clip`, V_old,t + `clip`) - R_t)² )

    Without `clip` it is ½ (V_t - R_t)². It is aggregated like the policy's loss. Statistics, each a
    mean: `vf_loss`, the loss; `vf_clipfrac`, the share of clipped tokens.

    The loss raises `BurnishError` without returns, or without old values to clip.
    """

    def value_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        aggregate = aggregation(kind, micro, max_response_length)
        mask = micro.loss_mask
        returns = torch.where(mask, micro.given("returns"), 0.0)
        values = torch.where(mask, outputs.values, 0.0)
        losses = (values - returns).square() / 2
        held = torch.zeros_like(mask)
        if clip is not None:
            old = torch.where(mask, micro.given("old_values"), 0.0)
            moved = values - old
            clipped = (old + moved.clamp(-clip, clip) - returns).square() / 2
            held = (moved.abs() > clip) & (clipped > losses)  # and not by rounding
            losses = torch.maximum(losses, clipped)
        loss = aggregate(losses)
        return loss, Stats(
            vf_loss=aggregate.mean_of(loss), vf_clipfrac=Mean((held & mask).sum(), mask.sum())
        )

    return value_loss
