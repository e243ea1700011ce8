from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from burnish.algorithms.kl import kl_estimates, kl_loss

ESTIMATORS = ["k1", "k2", "k3"]


def slow(estimator: str, difference: float) -> float:
    ratio = math.exp(-difference)  # π_ref / π
    return {
        "k1": -math.log(ratio),
        "k2": math.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - math.log(ratio),
    }[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_equal_schulmans_formulas(estimator: str) -> None:
    rng = np.random.default_rng(0)
    new, ref = -rng.exponential(size=50).astype("f4"), -rng.exponential(size=50).astype("f4")
    want = [slow(estimator, float(a) - float(b)) for a, b in zip(new, ref, strict=True)]
    everywhere = torch.ones(50, dtype=torch.bool)
    got = kl_loss(estimator, torch.tensor(new), torch.tensor(ref), everywhere)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    estimates = kl_estimates(estimator, new, ref)
    assert estimates.dtype == np.float32
    np.testing.assert_allclose(estimates, want, rtol=1e-4, atol=1e-6)


def test_k3_keeps_small_values() -> None:
    found = kl_estimates("k3", np.array([1e-3], "f4"), np.zeros(1, "f4"))
    np.testing.assert_allclose(found, 5e-7, rtol=2e-3)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def expected_gradient(estimator: str, logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """E_{y ~ π} of the loss term's gradient, the expectation taken exactly over a small vocabulary."""
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)
    mask = torch.ones_like(logits, dtype=torch.bool)
    terms = kl_loss(estimator, logprobs, ref, mask)
    (logprobs.exp().detach() * terms).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_expected_gradient_is_that_of_the_divergence_it_should_be(estimator: str) -> None:
    torch.manual_seed(0)
    logits, ref = torch.randn(7), torch.randn(7).log_softmax(-1)
    leaf = logits.clone().requires_grad_()
    policy = leaf.log_softmax(-1)
    reverse = estimator != "k3"
    (divergence(policy, ref) if reverse else divergence(ref, policy)).backward()
    torch.testing.assert_close(
        expected_gradient(estimator, logits, ref), leaf.grad, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_are_zero_in_value_and_gradient(estimator: str, poison: float) -> None:
    mask = torch.tensor([True, False])
    new = torch.tensor([-1.0, poison], requires_grad=True)
    terms = kl_loss(estimator, new, torch.tensor([-2.0, poison]), mask)
    terms.sum().backward()
    assert terms[1] == 0
    assert new.grad[1] == 0
    assert new.grad[0] != 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_token_the_policy_gave_up_does_not_overflow(estimator: str) -> None:
    found = kl_estimates(estimator, np.array([-300.0], "f4"), np.array([-1.0], "f4"))
    assert np.isfinite(found).all()


def test_no_tokens() -> None:
    assert kl_estimates("k3", np.zeros(0, "f4"), np.zeros(0, "f4")).shape == (0,)
