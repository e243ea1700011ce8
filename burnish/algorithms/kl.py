"""Estimate KL(π‖π_ref) from samples y ~ π (Schulman, http://joschu.net/blog/kl-approx.html).

With d = log π(y) - log π_ref(y), the reward uses the value, the loss the gradient (arXiv 2506.09477):

- k1 = d: unbiased, of high variance. Its gradient is 0 on average, so the loss uses k2's.
- k2 = d²/2: biased, of low variance. On average its gradient is that of KL(π‖π_ref).
- k3 = e^(-d) - 1 + d: unbiased, of low variance. On average its gradient (1 - e^(-d)) ∇log π is that of KL(π_ref‖π),
  as in GRPO (arXiv 2402.03300, equation 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.base import LOG_RATIO_BOUND
from burnish.config.algorithm import KLConfig, KLEstimator
from burnish.records import Floats


def kl_loss(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return each token's KL loss term, [T] fp32; 0 where `mask` is False."""
    difference = torch.where(mask, logprobs.float() - ref_logprobs.float(), 0.0)
    value = _estimate(estimator, difference)
    if estimator != "k1":
        return value
    gradient_of = _estimate("k2", difference)
    return value.detach() + (gradient_of - gradient_of.detach())


def kl_estimates(estimator: KLEstimator, logprobs: Floats, ref_logprobs: Floats) -> Floats:
    """Return each token's estimate, by which the reward is penalised, [T] fp32."""
    return _estimate(estimator, torch.from_numpy(logprobs - ref_logprobs)).numpy()


def adapted(coef: float, kl: float, rollouts: int, config: KLConfig) -> float:
    """Return β (1 + clip(kl / `target` - 1, -0.2, 0.2) · rollouts / `horizon`) for β = `coef` (arXiv 1909.08593, section 2.2).

    `kl` is the step's mean per token. Without a target, return β itself.
    """
    if config.target is None:
        return coef
    error = min(max(kl / config.target - 1, -0.2), 0.2)
    return coef * max(1 + error * rollouts / config.horizon, 0.0)


def _estimate(estimator: KLEstimator, difference: Tensor) -> Tensor:
    difference = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # expm1 keeps the small values that e^(-d) - 1 + d would lose to cancellation.
    return torch.expm1(-difference) + difference
