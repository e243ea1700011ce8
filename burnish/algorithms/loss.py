"""The loss functions that trainers hand to an engine.

Each is pure: it sees one micro-batch, returns its part of the step's loss and statistics that add up
over micro-batches and ranks, and never waits for the device. The names of statistics have no prefix: whose
loss it is (`actor/`, `critic/`, `train/`) the trainer knows. Left out: collectives, which are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.kl import kl_loss
from burnish.algorithms.mismatch import mismatch_stats, mismatch_weights
from burnish.algorithms.policy_loss import TokenLosses, load_policy_loss, old_logprobs
from burnish.config.schema import AlgorithmConfig
from burnish.errors import BurnishError
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats, Sum

Loss = Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]
"""What an engine runs on each micro-batch (`burnish.engines.base.LossFn`)."""


def sft_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """Negative log-likelihood per loss token: -Σ_s w_s Σ_t m_t log π(y_t) / (loss tokens of the global batch).

    Statistics: `tokens`, the number of tokens trained on. The mean itself is the engine's `loss`.
    """
    mean = aggregation("token_mean", micro, 1)
    loss = mean(-outputs.logprobs.float())
    return loss, Stats({"tokens": Sum(mean.local_units)})


def policy_loss_fn(config: AlgorithmConfig, max_response_length: int) -> Loss:
    """The loss of `config`: the surrogate, plus `kl.coef` · KL where it belongs in the loss, minus `entropy_coef` · H.

    All three are aggregated alike, `max_response_length` in tokens being sequence_sum_fixed's divisor.
    The entropy bonus needs `TokenOutputs.entropy` with a gradient. Statistics, each a mean that merges:

    - `pg_loss`, `kl_loss`: the terms as they enter the loss
    - `entropy`: nats per token
    - `ppo_kl`: mean of log π_old/π per token
    - `pg_clipfrac`, `pg_clipfrac_lower`: share of tokens held by the clip range, by the dual clip
    - `mismatch_...`: of the generator (`burnish.algorithms.mismatch`), where its log-probs are there

    The correction of the generator's mismatch multiplies the policy loss of each token, and no other term.
    The loss raises `BurnishError` for a micro-batch without advantages, or without reference or sampled log-probs where it needs them.
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
                kl_loss(config.kl.estimator, outputs.logprobs, _reference(micro), micro.loss_mask)
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

    def mean(values: Tensor) -> Mean:
        return Mean(torch.where(mask, values.detach().float(), 0.0).sum(), count)

    return Stats(
        {
            "entropy": mean(outputs.entropy),
            "ppo_kl": mean(-tokens.log_ratio),
            "pg_clipfrac": mean(tokens.clipped),
            "pg_clipfrac_lower": mean(tokens.clipped_lower),
        }
    )


def _reference(micro: MicroBatch) -> Tensor:
    if micro.ref_logprobs is None:
        raise BurnishError(
            "A KL term was given a micro-batch without reference log-probs.",
            have="ref_logprobs=None",
            want="the frozen reference model's log-prob of each token",
            do="fill them with Batch.with_ref_logprobs, or set algorithm.kl.coef to 0",
        )
    return micro.ref_logprobs
