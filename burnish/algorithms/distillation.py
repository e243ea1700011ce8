"""Losses of distillation: a student learns from what a teacher says of the same tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import Loss, SparseLoss, old_logprobs
from burnish.config.algorithm import AggregationKind
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats


def sampled_distillation(policy_loss: Loss, weight: float) -> Loss:
    """Return a policy loss with advantages A_t - `weight` · (log π_old(y_t) - log π_T(y_t)), for a teacher π_T.

    On tokens that the student drew, the difference estimates KL(π‖π_T), and as a reward its gradient is that of the KL (GKD, arXiv
    2306.13649; MiniLLM, arXiv 2306.08543). Statistics, besides the policy loss's: `reverse_kl`, its mean per token, in nats.
    """

    def distillation_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        # The old policy drew the tokens. With one update per step it is the policy itself, so nothing more is computed.
        old = old_logprobs(outputs.logprobs, micro).float()
        theirs = micro.given("teacher_logprobs")
        is_taught = micro.loss_mask & theirs.isfinite()
        apart = torch.where(is_taught, old - theirs, 0.0)
        advantages = micro.given("advantages") - weight * apart
        loss, stats = policy_loss(outputs, replace(micro, advantages=advantages))
        stats["reverse_kl"] = Mean(apart.sum(), is_taught.sum())
        return loss, stats

    return distillation_loss


def vocabulary_distillation(
    task_loss: Loss, weight: float, task: float, kind: AggregationKind, max_response_length: int
) -> Loss:
    """Return `task` · the task's loss + `weight` · the divergence from the teacher, aggregated as `kind` says.

    Statistics, besides the task loss's: `divergence`, which the engine has computed (`burnish.models.divergence`).
    """

    def distillation_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        loss, stats = task_loss(outputs, micro)
        mean = aggregation(kind, micro, max_response_length)
        weights = 1.0 if micro.weights is None else micro.weights
        divergence = mean(weights * outputs.probed)
        stats["divergence"] = mean.mean_of(divergence)
        loss = weight * divergence if task == 0 else task * loss + weight * divergence
        return loss, stats

    # The divergence has a gradient of its own, apart from that of log-probs.
    if isinstance(task_loss, SparseLoss):
        return replace(task_loss, function=distillation_loss)
    return distillation_loss
