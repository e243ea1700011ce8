from __future__ import annotations

import functools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.algorithms import policy_loss
from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import SparseLoss
from burnish.algorithms.distillation import sampled_distillation, vocabulary_distillation
from burnish.algorithms.kl import kl_loss
from burnish.algorithms.loss import policy_loss_fn
from burnish.config.algorithm import AlgorithmConfig, KLConfig, PolicyLossConfig, PPOSettings
from burnish.errors import BurnishError
from burnish.extend import POLICY_LOSSES
from burnish.records import MicroBatch, TokenOutputs
from burnish.runs.run import counted
from burnish.tracking.progress import Bar
from burnish.tracking.stats import Mean, Stats

KINDS = ["token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_fixed"]


def ppo_clip(new, micro, low, high, dual=None):
    config = AlgorithmConfig(clip_low=low, clip_high=high)
    return policy_loss.ppo(new, micro, config, PPOSettings(dual_clip=dual))


def gspo(new, micro, low, high):
    return policy_loss.gspo(new, micro, AlgorithmConfig(clip_low=low, clip_high=high))


def cispo(new, micro, low, high):
    return policy_loss.cispo(new, micro, AlgorithmConfig(clip_low=low, clip_high=high))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["ppo", "gspo", "cispo"])
def test_the_three_terms_add_up(make_case, policy: str, kind: str) -> None:
    config = AlgorithmConfig(
        policy_loss=policy,
        aggregation=kind,
        clip_low=0.1,
        clip_high=0.25,
        entropy_coef=0.01,
        kl=KLConfig(coef=0.3, estimator="k2"),
    )
    case = make_case()
    new, micro = case.outputs.logprobs, case.micro
    loss, stats = policy_loss_fn(config, 16)(case.outputs, micro)
    surrogate = {"ppo": ppo_clip, "gspo": gspo, "cispo": cispo}[policy]
    aggregate = aggregation(kind, micro, 16)
    surrogate_term = aggregate(surrogate(new, micro, 0.1, 0.25).loss)
    kl_term = aggregate(kl_loss("k2", new, micro.ref_logprobs, micro.loss_mask))
    want = surrogate_term + 0.3 * kl_term - 0.01 * aggregate(case.outputs.entropy)
    torch.testing.assert_close(loss, want)
    share = aggregate.global_units / aggregate.local_units
    np.testing.assert_allclose(stats["pg_loss"].value(), (surrogate_term * share).item(), rtol=1e-6)
    np.testing.assert_allclose(stats["kl_loss"].value(), (kl_term * share).item(), rtol=1e-6)
    loss.backward()
    assert case.outputs.entropy.grad[micro.loss_mask].all()
    assert new.grad.isfinite().all()


def test_entropy_and_reference_are_left_alone_without_coefficients(make_case) -> None:
    case = make_case()
    loss, stats = policy_loss_fn(AlgorithmConfig(), 16)(
        case.outputs, replace(case.micro, ref_logprobs=None)
    )
    loss.backward()
    assert case.outputs.entropy.grad is None
    assert "kl_loss" not in stats


def test_kl_in_the_reward_stays_out_of_the_loss(make_case) -> None:
    case = make_case()
    plain, _ = policy_loss_fn(AlgorithmConfig(), 16)(case.outputs, case.micro)
    config = AlgorithmConfig(kl=KLConfig(coef=0.3, place="reward"))
    with_kl, stats = policy_loss_fn(config, 16)(case.outputs, case.micro)
    assert torch.equal(plain, with_kl)
    assert "kl_loss" not in stats


def test_statistics_are_means_over_loss_tokens(make_case) -> None:
    case = make_case(lengths=((2, 50), (1, 30)), spread=1.0)
    new, micro = case.outputs.logprobs, case.micro
    _, stats = policy_loss_fn(AlgorithmConfig(policy_loss={"dual_clip": 1.5}), 16)(
        case.outputs, micro
    )
    values = stats.values_by_name()
    tokens = [t for members in case.sequences() for t in members]
    ratios = [math.exp(new[t].item() - micro.old_logprobs[t].item()) for t in tokens]
    signs = [micro.advantages[t].item() > 0 for t in tokens]
    pairs = list(zip(ratios, signs, strict=True))
    want = {
        "entropy": np.mean([case.outputs.entropy[t].item() for t in tokens]),
        "ppo_kl": np.mean([-math.log(ratio) for ratio in ratios]),
        "pg_clipfrac": np.mean([r > 1.2 if up else r < 0.8 for r, up in pairs]),
        "pg_clipfrac_lower": np.mean([r > 1.5 and not up for r, up in pairs]),
    }
    assert 0 < want["pg_clipfrac_lower"] < want["pg_clipfrac"] < 1
    for name, value in want.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_statistics_give_the_loss_of_the_step(make_case, kind: str) -> None:
    cases = [make_case(seed=1), make_case(lengths=((2, 3), (1, 8)), seed=2)]
    tokens = sum(int(case.micro.loss_mask.sum()) for case in cases)
    loss_fn = policy_loss_fn(AlgorithmConfig(aggregation=kind, kl=KLConfig(coef=0.1)), 16)
    total, merged = 0.0, Stats()
    for case in cases:
        micro = replace(case.micro, num_tokens=tokens, num_sequences=5)
        loss, stats = loss_fn(case.outputs, micro)
        total += loss.item()
        merged = merged.merge(stats)
    values = merged.values_by_name()
    np.testing.assert_allclose(values["pg_loss"] + 0.1 * values["kl_loss"], total, rtol=1e-5)
    assert isinstance(merged["entropy"], Mean)
    assert float(merged["entropy"].count) == tokens


def test_a_filler_without_loss_tokens_adds_nothing(make_case) -> None:
    case = make_case(lengths=((4, 0),))
    config = AlgorithmConfig(kl=KLConfig(coef=0.1), entropy_coef=0.1)
    loss, stats = policy_loss_fn(config, 16)(case.outputs, case.micro)
    loss.backward()
    assert loss == 0
    assert not case.outputs.logprobs.grad.any()
    assert all(metric.total == 0 and metric.count == 0 for metric in stats.values())


def test_finite_differences_agree_with_the_gradient() -> None:
    """In the region where no bound is active, for the whole loss and each aggregation."""
    rng = np.random.default_rng(0)
    base = -rng.exponential(size=8)
    micro = MicroBatch(
        input_ids=torch.zeros(8, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, True, False, True, True, True, True]),
        num_tokens=6,
        num_sequences=2,
        advantages=torch.tensor(rng.normal(size=8), dtype=torch.float32),
        old_logprobs=torch.tensor(base + 0.02, dtype=torch.float32),
        ref_logprobs=torch.tensor(base - 0.3, dtype=torch.float32),
    )
    for kind in KINDS:
        config = AlgorithmConfig(aggregation=kind, kl=KLConfig(coef=0.5, estimator="k3"))
        loss_fn = policy_loss_fn(config, 4)

        def loss_at(values: np.ndarray, loss_fn=loss_fn) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tensor(values, dtype=torch.float32, requires_grad=True)
            return loss_fn(TokenOutputs(new, torch.zeros(8)), micro)[0], new

        loss, new = loss_at(base)
        loss.backward()
        for t in range(8):
            step = np.zeros(8)
            step[t] = 1e-2
            slope = (loss_at(base + step)[0] - loss_at(base - step)[0]).item() / 2e-2
            np.testing.assert_allclose(new.grad[t], slope, rtol=2e-3, atol=2e-4)


def test_missing_reference_is_refused(make_case) -> None:
    case = make_case()
    loss_fn = policy_loss_fn(AlgorithmConfig(kl=KLConfig(coef=0.1)), 16)
    with pytest.raises(BurnishError):
        loss_fn(case.outputs, replace(case.micro, ref_logprobs=None))


NUMBERS = st.floats(0.05, 3.0)
OPTIONS = {
    "clip_low": st.sampled_from([0.0, 0.1, 0.5]),
    "clip_high": st.sampled_from([0.0, 0.1, 0.5]),
    "top_entropy": st.none() | st.just(0.2),
    "aggregation": st.sampled_from(KINDS),
    "entropy_coef": st.just(0.0),
    "mismatch_cap": st.none() | st.floats(1.0, 3.0),
    "mismatch_level": st.sampled_from(["token", "sequence"]),
    "mismatch_reject": st.sampled_from(["none", "token", "sequence", "geometric"]),
    "mismatch_low": st.floats(0.3, 0.9),
    "mismatch_high": st.floats(1.1, 3.0),
    "kl": st.sampled_from([KLConfig(), KLConfig(coef=0.3, place="reward")]),
}
"""All settings of `algorithm` that the loss may read, without terms for all tokens (`TERMS`)."""
TERMS = {
    "entropy": {"entropy_coef": 0.01},
    "less entropy": {"entropy_coef": -0.01},
    **{kind: {"kl": KLConfig(coef=0.1, estimator=kind)} for kind in ("k1", "k2", "k3")},
}
BEFORE_THE_LOSS = {
    *("advantage", "old_logprobs", "mask_truncated", "router_replay"),
    *("dynamic_sampling", "overlong"),
}
OWN = {
    "dual_clip": st.none() | st.floats(1.1, 3.0),
    "temperature_pos": NUMBERS,
    "temperature_neg": NUMBERS,
    "cov_penalty": NUMBERS,
}
"""Settings of formulas that a loss may read. Those of covariance are for choosing tokens."""


def test_all_options_are_drawn() -> None:
    read = {"policy_loss", *OPTIONS}
    assert read | BEFORE_THE_LOSS == set(AlgorithmConfig.model_fields)
    classes = PolicyLossConfig.own_settings.values()
    fields = {name for settings in classes for name in settings.model_fields}
    assert {name for name in fields if name not in ("cov_ratio", "cov_low", "cov_high")} == set(OWN)


def of_draw(data: st.DataObject, name: str, make_case: Any) -> tuple[Any, Any, torch.Tensor]:
    """Settings, a micro-batch in which some advantages are 0, and its marks of tokens."""
    settings = PolicyLossConfig.own_settings.get(name)
    fields = [] if settings is None else [key for key in settings.model_fields if key in OWN]
    own = {key: data.draw(OWN[key], key) for key in fields}
    options = {key: data.draw(values, key) for key, values in OPTIONS.items()}
    config = AlgorithmConfig(policy_loss={"name": name, **own}, **options)
    seed = data.draw(st.integers(0, 1000))
    case = make_case(seed=seed, spread=data.draw(st.sampled_from([0.5, 0.0, 30.0])))
    rng = np.random.default_rng(seed)
    size = len(case.micro.input_ids)
    kept = torch.tensor(rng.random(size) < data.draw(st.sampled_from([0.5, 0.0, 1.0])))
    selected = torch.tensor(rng.random(size) < 0.5)
    micro = replace(
        case.micro,
        advantages=torch.where(kept, case.micro.advantages, 0.0),
        old_logprobs=None if data.draw(st.booleans()) else case.micro.old_logprobs,
        sampled_logprobs=case.micro.ref_logprobs + 0.1,
        selected=selected,
    )
    return config, replace(case, micro=micro), kept


@pytest.mark.parametrize("name", POLICY_LOSSES)
@draws(200, day=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_that_a_loss_does_not_name_have_no_gradient(make_case, name: str, data) -> None:
    config, case, kept = of_draw(data, name, make_case)
    loss = policy_loss_fn(config, 16)
    assert isinstance(loss, SparseLoss)
    mask = case.micro.loss_mask
    learned = loss.learned(case.micro)
    loss(case.outputs, case.micro)[0].backward()
    gradient = case.outputs.logprobs.grad
    assert gradient is not None
    assert case.outputs.entropy.grad is None
    assert torch.equal(gradient[mask & ~learned], torch.zeros_like(gradient[mask & ~learned]))
    assert gradient[mask].isfinite().all()
    # It leaves out what it can: without bounds, a token of weight 0 has an advantage of 0 or a mark.
    if name == "cispo" and config.mismatch_reject == "none" and config.top_entropy is None:
        assert learned[mask].equal(kept[mask])


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_with_terms_for_all_tokens_learns_from_all(name: str, term: str) -> None:
    config = AlgorithmConfig(policy_loss=name, **TERMS[term])
    assert not isinstance(policy_loss_fn(config, 16), SparseLoss)


def test_a_loss_that_is_not_ours_learns_from_all_tokens(make_case, tmp_path: Path) -> None:
    """A function of one's own, and one around ours."""
    (tmp_path / "own.py").write_text(OWN_LOSS)
    config = AlgorithmConfig(policy_loss={"name": f"{tmp_path / 'own.py'}:own"})
    assert not isinstance(policy_loss_fn(config, 16), SparseLoss)
    ours = policy_loss_fn(AlgorithmConfig(), 16)
    assert isinstance(ours, SparseLoss)
    assert not isinstance(functools.wraps(ours)(lambda *given: ours(*given)), SparseLoss)
    assert not isinstance(sampled_distillation(ours, 1.0), SparseLoss)
    assert isinstance(counted(ours, Bar(lambda *_: None, time.monotonic, lambda: None)), SparseLoss)


@pytest.mark.parametrize("task", [0.0, 0.5])
def test_a_divergence_beside_a_loss_leaves_its_tokens_alone(make_case, task: float) -> None:
    case = make_case()
    ours = policy_loss_fn(AlgorithmConfig(), 16)
    loss = vocabulary_distillation(ours, 2.0, task, "token_mean", 16)
    assert isinstance(loss, SparseLoss)
    assert loss.learned(case.micro).equal(case.micro.advantages != 0)
    outputs = replace(case.outputs, probed=case.outputs.entropy.detach().requires_grad_())
    value, _ = loss(outputs, case.micro)
    value.backward()
    aggregate = aggregation("token_mean", case.micro, 16)
    wanted = task * ours(case.outputs, case.micro)[0] + 2 * aggregate(outputs.probed)
    torch.testing.assert_close(value, wanted)
    assert outputs.probed.grad[case.micro.loss_mask].all()
    # Without a share in the loss, nothing of log-probs is computed again.
    assert (case.outputs.logprobs.grad is None) == (task == 0)


OWN_LOSS = """
def own(logprobs, micro, config):
    return -logprobs
"""
