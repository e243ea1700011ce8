"""Estimators of the divergence from a reference policy, from single samples.

Schulman's three (http://joschu.net/blog/kl-approx.html) of KL(π‖π_ref) for y ~ π, with
d = log π(y) - log π_ref(y):

- k1 = d: unbiased, of high variance, negative half the time
- k2 = d²/2: biased, of low variance
- k3 = e^(-d) - 1 + d: unbiased, of low variance, never negative

As a *value* (KL in the reward) each is what it says. As a *loss* only the gradient matters, and
that is another question (arXiv 2506.09477): the gradient of k1 is ∇log π, which is 0 on average; that of
k2 is d ∇log π, on average the gradient of KL(π‖π_ref); that of k3 is (1 - e^(-d)) ∇log π, on average the
gradient of the *other* divergence, KL(π_ref‖π). So in the loss k1 keeps its value and takes k2's
gradient, k2 is the correct choice as it stands, and k3 is differentiated as it stands, because that is
GRPO (arXiv 2402.03300, equation 4) as published and as its users expect; close to the reference the two
agree to first order.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.policy_loss import LOG_RATIO_BOUND
from burnish.config.schema import KLConfig
from burnish.records import Floats

KLEstimator = Literal["k1", "k2", "k3"]
"""The estimators, by their name in the configuration."""


def kl_loss(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] fp32, each token's divergence as a loss term, with the gradient described above; 0 where `mask` is False."""
    difference = torch.where(mask, logprobs.float() - ref_logprobs.float(), 0.0)
    value = _estimate(estimator, difference)
    if estimator != "k1":
        return value
    gradient_of = _estimate("k2", difference)
    return value.detach() + (gradient_of - gradient_of.detach())


def kl_penalty(
    estimator: KLEstimator, coef: float, logprobs: Floats, ref_logprobs: Floats
) -> Floats:
    """What KL in the reward takes from each token: `coef` times the estimate, fp32, of the same shape.

    `logprobs` are those of the policy that the update is measured against, without gradient. The
    result is a `token_penalties` entry of `burnish.algorithms.advantages.advantages`.
    """
    difference = torch.from_numpy(logprobs).float() - torch.from_numpy(ref_logprobs).float()
    penalty: Floats = (coef * _estimate(estimator, difference)).numpy()
    return penalty


def adapted(coef: float, kl: float, rollouts: int, config: KLConfig) -> float:
    """Return the coefficient after a step of `rollouts` rollouts with mean `kl` per token (arXiv 1909.08593, section 2.2).

    β ← β (1 + clip(kl / `target` - 1, -0.2, 0.2) · rollouts / `horizon`); β itself without a target.
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
