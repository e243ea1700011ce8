"""Measure and correct the mismatch between the policy μ that drew the tokens and π_old.

Generator and engine use different kernels, and only the generator truncates (Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training").

π_old(y) is the engine's, at the sampling temperature, before any update of the step. μ(y) is
`MicroBatch.sampled_logprobs`, after temperature and truncation. With truncation π_old/μ lies around
the kept share of the distribution, not around 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.algorithms.aggregation import loss_lengths, sequence_means, to_tokens
from burnish.algorithms.base import LOG_RATIO_BOUND
from burnish.algorithms.kl import kl_loss
from burnish.config.algorithm import AlgorithmConfig
from burnish.distributed.device import widest_float
from burnish.records import MicroBatch
from burnish.tracking.stats import EffectiveShare, Max, Mean, Stats


def mismatch_stats(old_logprobs: Tensor, micro: MicroBatch) -> Stats:
    """Compare π_old's log-probs [T] with μ's; empty without `sampled_logprobs`.

    - `mismatch_kl`: mean of e^d - 1 - d, d = log π_old/μ, an estimate of KL(μ‖π_old); too low where μ is truncated
    - `mismatch_max`: the largest |d|
    """
    if micro.sampled_logprobs is None:
        return Stats()
    mask = micro.loss_mask
    sampled = micro.sampled_logprobs
    estimates = kl_loss("k3", sampled, old_logprobs, mask)
    return Stats(
        mismatch_kl=Mean(estimates.sum(), mask.sum()),
        mismatch_max=Max(_log_ratio(old_logprobs, micro).abs().max()),
    )


def mismatch_weights(
    old_logprobs: Tensor, micro: MicroBatch, config: AlgorithmConfig
) -> tuple[Tensor, Stats]:
    """Return the factor [T] fp32 on each token's policy loss, without gradient, and its statistics.

    With ρ_t = π_old(y_t)/μ(y_t) and ρ = Π_t ρ_t, the factor by `mismatch_level` is

    - token: min(ρ_t, `mismatch_cap`) (truncated importance sampling, Yao et al. 2025)
    - sequence: min(ρ, `mismatch_cap`) (verl's sequence TIS)

    and 1 without a cap. `mismatch_reject` makes it 0 outside [`mismatch_low`, `mismatch_high`]:

    - token: by ρ_t (IcePop, arXiv 2510.18855, equation 3)
    - sequence: by ρ (masked importance sampling; Liu et al. 2025)
    - geometric: by ρ^(1/|y|), which does not fall with the length

    `mismatch_ess` (effective sample size), `mismatch_capped` and `mismatch_rejected` are shares
    of tokens. Raises `BurnishError` without `sampled_logprobs`.
    """
    ratios = _log_ratio(old_logprobs, micro)
    means = sequence_means(ratios, micro)
    by_level = {
        "token": ratios,
        "sequence": to_tokens(means * loss_lengths(micro), micro),
        "geometric": to_tokens(means, micro),
    }
    weights = torch.ones_like(ratios)
    count = micro.loss_mask.sum()
    stats = Stats()
    if config.mismatch_cap is not None:
        ratio = by_level[config.mismatch_level].clamp(max=LOG_RATIO_BOUND).exp()
        weights = ratio.clamp(max=config.mismatch_cap)
        capped = (ratio > config.mismatch_cap) & micro.loss_mask
        stats |= {"mismatch_capped": Mean(capped.sum(), count)}
    if config.mismatch_reject != "none":
        measure = by_level[config.mismatch_reject]
        low = math.log(config.mismatch_low)
        high = math.log(config.mismatch_high)
        rejected = ((measure < low) | (measure > high)) & micro.loss_mask
        weights = torch.where(rejected, 0.0, weights)
        stats |= {"mismatch_rejected": Mean(rejected.sum(), count)}
    trained = torch.where(micro.loss_mask, weights, 0.0).to(widest_float(weights.device))
    stats["mismatch_ess"] = EffectiveShare(trained.sum(), trained.square().sum(), count)
    return torch.where(micro.loss_mask, weights, 1.0), stats


def _log_ratio(old_logprobs: Tensor, micro: MicroBatch) -> Tensor:
    difference = old_logprobs.float() - micro.given("sampled_logprobs").float()
    return torch.where(micro.loss_mask, difference, 0.0)
