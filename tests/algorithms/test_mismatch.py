"""The generator's mismatch against numpy: its measures, and the factor on each token's policy loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.algorithms.loss import policy_loss_fn
from burnish.algorithms.mismatch import mismatch_stats, mismatch_weights
from burnish.config.algorithm import AlgorithmConfig, KLConfig
from burnish.errors import BurnishError
from burnish.records import MicroBatch


def drawn(case, spread: float = 0.5) -> MicroBatch:
    """The case's micro-batch with the log-probs of a generator that is off by `spread`."""
    shifts = torch.randn(len(case.micro.loss_mask), generator=torch.Generator().manual_seed(1))
    sampled = case.micro.old_logprobs + spread * shifts
    return replace(case.micro, sampled_logprobs=sampled)


def ratios(micro: MicroBatch, old: torch.Tensor) -> np.ndarray:
    """log π_old/μ of the trained tokens."""
    return (old.detach() - micro.sampled_logprobs)[micro.loss_mask].double().numpy()


def test_measures_are_over_trained_tokens(make_case) -> None:
    case = make_case()
    micro = drawn(case)
    d = ratios(micro, micro.old_logprobs)
    found = mismatch_stats(micro.old_logprobs, micro).values_by_name()
    assert found["mismatch_kl"] == pytest.approx(np.mean(np.exp(d) - 1 - d), rel=1e-5)
    assert found["mismatch_max"] == pytest.approx(np.abs(d).max(), rel=1e-6)
    assert mismatch_stats(micro.old_logprobs, case.micro) == {}


def test_it_estimates_the_divergence_of_the_generator() -> None:
    """KL(μ‖π) of two known distributions, over many draws from μ."""
    rng = np.random.default_rng(0)
    mu, pi = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
    tokens = rng.choice(8, size=200_000, p=mu)
    micro = MicroBatch(
        input_ids=torch.tensor(tokens),
        cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        num_tokens=len(tokens),
        num_sequences=1,
        sampled_logprobs=torch.tensor(np.log(mu)[tokens], dtype=torch.float32),
    )
    found = mismatch_stats(torch.tensor(np.log(pi)[tokens]), micro)["mismatch_kl"].value()
    assert found == pytest.approx((mu * np.log(mu / pi)).sum(), rel=0.03)
    assert found != pytest.approx((pi * np.log(pi / mu)).sum(), rel=0.1)


def test_weights_are_truncated_ratios(make_case) -> None:
    case = make_case()
    micro = drawn(case)
    weights, stats = mismatch_weights(micro.old_logprobs, micro, AlgorithmConfig(mismatch_cap=1.3))
    d = ratios(micro, micro.old_logprobs)
    np.testing.assert_allclose(
        weights[micro.loss_mask], np.minimum(np.exp(d), 1.3).astype(np.float32), rtol=1e-5
    )
    assert weights.isfinite().all()
    share = np.mean(np.exp(d) > 1.3)
    assert 0 < share < 1
    assert stats["mismatch_capped"].value() == pytest.approx(share)
    w = np.minimum(np.exp(d), 1.3)
    assert stats["mismatch_ess"].value() == pytest.approx(w.sum() ** 2 / len(w) / (w**2).sum())


@pytest.mark.parametrize("measured_against", ["itself", "before"])
@pytest.mark.parametrize("policy", ["ppo", "gspo", "cispo"])
def test_each_tokens_surrogate_and_gradient_is_weighted_and_nothing_else(
    make_case, policy: str, measured_against: str
) -> None:
    case = make_case()
    micro = drawn(case)
    if measured_against == "itself":
        micro = replace(micro, old_logprobs=None)
    old = case.outputs.logprobs if micro.old_logprobs is None else micro.old_logprobs
    weights = np.zeros(len(micro.loss_mask))
    weights[micro.loss_mask] = np.minimum(np.exp(ratios(micro, old)), 1.3)
    found = {}
    for cap in (None, 1.3):
        settings = {"policy_loss": policy, "mismatch_cap": cap, "entropy_coef": 0.1}
        config = AlgorithmConfig(**settings, kl=KLConfig(coef=0.2))
        config_alone = AlgorithmConfig(**settings | {"entropy_coef": 0.0})
        both, _ = policy_loss_fn(config, 16)(case.outputs, micro)
        alone, _ = policy_loss_fn(config_alone, 16)(case.outputs, micro)
        (gradient,) = torch.autograd.grad(alone, case.outputs.logprobs)
        found[cap] = (both - alone).item(), gradient.numpy()
    assert found[None][0] == pytest.approx(found[1.3][0], rel=1e-4)  # KL and entropy
    np.testing.assert_allclose(
        found[1.3][1], np.nan_to_num(found[None][1]) * weights, rtol=1e-5, atol=1e-9
    )


def test_a_micro_batch_without_the_generators_log_probs_is_refused(make_case) -> None:
    case = make_case()
    with pytest.raises(BurnishError, match="sampled_logprobs"):
        policy_loss_fn(AlgorithmConfig(mismatch_cap=2.0), 16)(case.outputs, case.micro)


def test_a_filler_adds_nothing(make_case) -> None:
    micro = drawn(make_case(lengths=((4, 0),)))
    stats = mismatch_stats(micro.old_logprobs, micro)
    assert (stats["mismatch_kl"].total, stats["mismatch_kl"].count) == (0, 0)
    assert stats["mismatch_max"].value() == 0


@pytest.mark.parametrize("reject", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_by_sequence_and_rejection_equal_a_loop(make_case, level: str, reject: str) -> None:
    case = make_case(lengths=((2, 5), (1, 1), (3, 0), (4, 9), (1, 3), (1, 6)))
    micro = drawn(case, 0.4)
    config = AlgorithmConfig(
        mismatch_cap=1.5,
        mismatch_level=level,
        mismatch_reject=reject,
        mismatch_low=0.7,
        mismatch_high=1.4,
    )
    weights, stats = mismatch_weights(micro.old_logprobs, micro, config)
    capped = rejected = count = 0
    for tokens in case.sequences():
        d = [(micro.old_logprobs[t] - micro.sampled_logprobs[t]).item() for t in tokens]
        for t, own in zip(tokens, d, strict=True):
            ratio = np.exp(own if level == "token" else sum(d))
            measure = {"token": own, "sequence": sum(d), "geometric": np.mean(d), "none": 0.0}
            out = reject != "none" and not 0.7 <= np.exp(measure[reject]) <= 1.4
            np.testing.assert_allclose(weights[t], 0 if out else min(ratio, 1.5), rtol=1e-5)
            capped, rejected, count = capped + (ratio > 1.5), rejected + out, count + 1
    assert stats["mismatch_capped"].value() == pytest.approx(capped / count)
    if reject != "none":
        assert 0 < rejected < count
        assert stats["mismatch_rejected"].value() == pytest.approx(rejected / count)
