"""The loss functions that engines run on micro-batches.

Each is pure and never waits for the device.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import (
    Loss,
    SparseLoss,
    TokenLosses,
    load_policy_loss,
    log_ratio,
    old_logprobs,
)
from burnish.algorithms.kl import kl_loss
from burnish.algorithms.mismatch import mismatch_stats, mismatch_weights
from burnish.config.algorithm import AlgorithmConfig
from burnish.extend import POLICY_LOSSES
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats


def policy_loss_fn(config: AlgorithmConfig, max_response_length: int) -> Loss:
    """Return the surrogate, plus `kl.coef` · KL if used, minus `entropy_coef` · H, aggregated alike.

    The entropy bonus needs `TokenOutputs.entropy` with a gradient. The mismatch correction multiplies
    the surrogate alone. Statistics, besides `burnish.algorithms.mismatch`'s:

    - `pg_loss`, `kl_loss`: the terms without coefficients
    - `entropy`: nats per token
    - `ppo_kl`: mean of log π_old/π per token
    - `pg_clipfrac`, `pg_clipfrac_lower`: share of tokens bounded by the clip range, by the dual clip

    The loss raises `BurnishError` without advantages or needed reference or sampled log-probs.
    """
    kl_in_loss = config.kl.coef > 0 and config.kl.place == "loss"
    surrogate = load_policy_loss(config)

    def policy_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        # Every term is a sum of token losses times the same coefficients, so adding terms keeps the loss independent of how the
        # batch is cut. Statistics stay on the device until the engine reduces them once per step.
        aggregate = aggregation(config.aggregation, micro, max_response_length)
        tokens = surrogate(outputs.logprobs, micro)
        old = old_logprobs(outputs.logprobs, micro)
        stats = Stats(_statistics(tokens, outputs, micro) | mismatch_stats(old, micro))
        losses = tokens.loss
        if config.top_entropy is not None and micro.selected is not None:
            losses = torch.where(micro.selected, losses, 0.0)
        if config.mismatch_cap is not None or config.mismatch_reject != "none":
            weights, weight_stats = mismatch_weights(old, micro, config)
            losses = losses * weights
            stats |= weight_stats
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

    # Terms of KL and entropy move every token, and so may a formula that is not ours.
    if kl_in_loss or config.entropy_coef != 0 or config.policy_loss.name not in POLICY_LOSSES:
        return policy_loss
    return SparseLoss(policy_loss, partial(_learned, config))


def _learned(config: AlgorithmConfig, micro: MicroBatch) -> Tensor:
    # Built-in formulas multiply by the advantage. Only kl_cov adds a term.
    learned = micro.given("advantages") != 0
    if config.policy_loss.name == "kl_cov":
        learned |= micro.given("selected")
    if config.top_entropy is not None and micro.selected is not None:
        learned &= micro.selected
    return learned


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
