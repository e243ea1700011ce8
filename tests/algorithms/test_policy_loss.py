from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.algorithms import policy_loss
from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import LOG_RATIO_BOUND, load_policy_loss, log_ratio
from burnish.config.algorithm import AlgorithmConfig, PPOSettings
from burnish.errors import BurnishError, UsageError

LOW, HIGH, DUAL = 0.2, 0.3, 2.0


def ppo_clip(new, micro, low, high, dual=None):
    config = AlgorithmConfig(clip_low=low, clip_high=high)
    return policy_loss.ppo(new, micro, config, PPOSettings(dual_clip=dual))


def gspo(new, micro, low, high):
    return policy_loss.gspo(new, micro, AlgorithmConfig(clip_low=low, clip_high=high))


def cispo(new, micro, low, high):
    return policy_loss.cispo(new, micro, AlgorithmConfig(clip_low=low, clip_high=high))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def slow_ppo(new: float, old: float, advantage: float, dual: float | None) -> float:
    ratio = math.exp(new - old)
    objective = min(ratio * advantage, clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


@pytest.mark.parametrize("dual", [None, DUAL])
def test_ppo_equals_the_slow_transcription(make_case, dual: float | None) -> None:
    case = make_case(lengths=((3, 200), (1, 60)), spread=1.0)
    new, micro = case.outputs.logprobs, case.micro
    got = ppo_clip(new, micro, LOW, HIGH, dual)
    held = held_lower = 0
    for tokens in case.sequences():
        for t in tokens:
            args = new[t].item(), micro.old_logprobs[t].item(), micro.advantages[t].item()
            want = slow_ppo(*args, dual)
            np.testing.assert_allclose(got.loss[t].item(), want, rtol=1e-5, atol=1e-6)
            ratio, advantage = math.exp(args[0] - args[1]), args[2]
            # Held back: beyond the bound on the side that the advantage pushes towards.
            assert bool(got.clipped[t]) == (ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW)
            assert bool(got.clipped_lower[t]) == (
                dual is not None and advantage < 0 and ratio > dual
            )
            held += bool(got.clipped[t])
            held_lower += bool(got.clipped_lower[t])
    assert held > 20
    assert (held_lower > 5) == (dual is not None)


def test_ppo_has_no_gradient_where_it_is_clipped(make_case) -> None:
    case = make_case(lengths=((3, 200),), spread=1.0)
    got = ppo_clip(case.outputs.logprobs, case.micro, LOW, HIGH, DUAL)
    got.loss.sum().backward()
    gradient = case.outputs.logprobs.grad
    held = got.clipped | got.clipped_lower
    assert not gradient[held & case.micro.loss_mask].any()
    free = ~held & case.micro.loss_mask
    ratio = log_ratio(case.outputs.logprobs, case.micro).detach().exp()
    want = -(ratio * case.micro.advantages)[free]
    torch.testing.assert_close(gradient[free], want, rtol=1e-5, atol=1e-6)


def test_gspo_equals_the_sequence_objective_in_value_and_gradient(make_case) -> None:
    case = make_case(spread=0.3)
    micro = with_sequence_advantages(case)
    new = case.outputs.logprobs
    loss = aggregation("sequence_mean", micro, 1)(gspo(new, micro, LOW, HIGH).loss)
    loss.backward()

    double = new.detach().double().clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for tokens in case.sequences():
        if not tokens:
            continue
        difference = double[tokens] - micro.old_logprobs[tokens].double()
        ratio = torch.exp(difference.sum() / len(tokens))
        advantage = micro.advantages[tokens[0]].double()
        held = ratio.clamp(1 - LOW, 1 + HIGH)
        objective = objective + torch.minimum(ratio * advantage, held * advantage)
    want = -objective / micro.num_sequences
    want.backward()
    np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-5)
    torch.testing.assert_close(new.grad, double.grad.float(), rtol=1e-4, atol=1e-7)
    assert new.grad.any()


def with_sequence_advantages(case):
    advantages = torch.full_like(case.micro.advantages, float("nan"))
    for s, tokens in enumerate(case.sequences()):
        advantages[tokens] = (-1.0) ** s * (s + 1)
    return replace(case.micro, advantages=advantages)


def test_gspo_clips_whole_sequences(make_case) -> None:
    case = make_case(lengths=((1, 4), (1, 4)), spread=0.0)
    # The first sequence's mean log-ratio is 0.5 although one of its tokens moved the other way.
    shift = torch.tensor([0, 1.0, 1.0, 1.0, -1.0] + [0.0] * 5)
    micro = replace(
        case.micro,
        old_logprobs=case.outputs.logprobs.detach() - shift,
        advantages=torch.ones(10),
    )
    got = gspo(case.outputs.logprobs, micro, LOW, HIGH)
    assert got.clipped[1:5].all()
    assert not got.clipped[6:].any()
    np.testing.assert_allclose(got.loss[1:5].detach(), -(1 + HIGH), rtol=1e-6)


def test_cispo_equals_the_slow_transcription_and_every_token_keeps_its_gradient(make_case) -> None:
    case = make_case(lengths=((3, 100), (1, 40)), spread=1.0)
    new, micro = case.outputs.logprobs, case.micro
    got = cispo(new, micro, LOW, HIGH)
    got.loss.sum().backward()
    held = 0
    for tokens in case.sequences():
        for t in tokens:
            ratio = math.exp(new[t].item() - micro.old_logprobs[t].item())
            weight = clip(ratio, 1 - LOW, 1 + HIGH)
            advantage = micro.advantages[t].item()
            want = -weight * advantage * new[t].item()
            np.testing.assert_allclose(got.loss[t].item(), want, rtol=1e-5)
            np.testing.assert_allclose(new.grad[t], -weight * advantage, rtol=1e-5)
            assert bool(got.clipped[t]) == (weight != ratio)
            held += bool(got.clipped[t])
    assert held > 20


SURROGATES = [
    pytest.param(lambda new, micro: ppo_clip(new, micro, LOW, HIGH, DUAL), id="ppo"),
    pytest.param(lambda new, micro: gspo(new, micro, LOW, HIGH), id="gspo"),
    pytest.param(lambda new, micro: cispo(new, micro, LOW, HIGH), id="cispo"),
    *(
        pytest.param(load_policy_loss(AlgorithmConfig(policy_loss=name)), id=name)
        for name in ("sapo", "gmpo", "dppo_tv", "dppo_kl")
    ),
]


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_on_policy_all_are_the_policy_gradient(make_case, surrogate) -> None:
    case = make_case(lengths=((2, 30),))
    new = case.outputs.logprobs
    on_policy = replace(case.micro, old_logprobs=None)
    surrogate(new, on_policy).loss.sum().backward()
    mask = case.micro.loss_mask
    torch.testing.assert_close(new.grad[mask], -case.micro.advantages[mask])
    given = new.detach().clone().requires_grad_()
    surrogate(given, replace(case.micro, old_logprobs=new.detach())).loss.sum().backward()
    assert torch.equal(given.grad, new.grad)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_of_masked_tokens_gets_through(make_case, surrogate, poison: float) -> None:
    clean, dirty = make_case(poison=0.0), make_case(poison=poison)
    results = []
    for case in (clean, dirty):
        tokens = surrogate(case.outputs.logprobs, case.micro)
        assert tokens.loss.isfinite().all()
        loss = aggregation("sequence_mean", case.micro, 1)(tokens.loss)
        loss.backward()
        results.append((loss, case.outputs.logprobs.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not results[1][1][~dirty.micro.loss_mask].any()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_ratios_do_not_overflow(make_case, surrogate) -> None:
    case = make_case(lengths=((1, 4),))
    old = torch.tensor([0.0, -500.0, -500.0, -500.0, -500.0])
    micro = replace(case.micro, old_logprobs=old, advantages=torch.tensor([0, 1.0, -1, 0, -1]))
    tokens = surrogate(case.outputs.logprobs, micro)
    tokens.loss.sum().backward()
    assert tokens.loss.isfinite().all()
    assert tokens.loss.abs().max() <= 2 * math.exp(LOG_RATIO_BOUND)
    assert case.outputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_ratio_is_formed_in_fp32_from_half_precision(make_case, surrogate) -> None:
    case = make_case(lengths=((2, 30),))
    low = case.outputs.logprobs.detach().bfloat16()
    assert torch.equal(surrogate(low, case.micro).loss, surrogate(low.float(), case.micro).loss)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_batch_without_advantages_is_refused(make_case, surrogate) -> None:
    case = make_case()
    with pytest.raises(BurnishError):
        surrogate(case.outputs.logprobs, replace(case.micro, advantages=None))


def slow_sapo(new: float, old: float, advantage: float) -> float:
    tau = 1.5 if advantage > 0 else 3.0
    return -4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1))) * advantage


def slow_dppo(new: float, old: float, advantage: float, kl: bool) -> float:
    p, q = math.exp(old), math.exp(new)
    far = abs(p - q)
    if kl:
        far = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    outwards = (q > p and far > HIGH) if advantage > 0 else (q < p and far > LOW)
    return 0.0 if outwards else -q / p * advantage


@pytest.mark.parametrize("name", ["sapo", "dppo_tv", "dppo_kl"])
def test_formulas_of_tokens_equal_their_slow_transcription(make_case, name: str) -> None:
    case = make_case(lengths=((3, 200), (1, 60)), spread=1.0)
    old = case.micro.old_logprobs.clamp(max=-0.05)
    new, micro = (
        case.outputs.logprobs.detach().clamp(max=-0.05),
        replace(case.micro, old_logprobs=old),
    )
    own = {"temperature_pos": 1.5, "temperature_neg": 3.0} if name == "sapo" else {}
    config = AlgorithmConfig(policy_loss={"name": name, **own}, clip_low=LOW, clip_high=HIGH)
    got = load_policy_loss(config)(new, micro)
    held = 0
    for tokens in case.sequences():
        for t in tokens:
            args = new[t].item(), old[t].item(), micro.advantages[t].item()
            want = slow_sapo(*args) if name == "sapo" else slow_dppo(*args, name == "dppo_kl")
            np.testing.assert_allclose(got.loss[t].item(), want, rtol=1e-4, atol=1e-5)
            held += got.clipped is not None and bool(got.clipped[t])
    assert (held > 5) == (name != "sapo")


def test_gmpo_equals_the_geometric_mean_in_value_and_gradient(make_case) -> None:
    case = make_case(spread=0.3)
    micro = with_sequence_advantages(case)
    new = case.outputs.logprobs
    tokens_of = policy_loss.gmpo(new, micro, AlgorithmConfig(clip_low=LOW, clip_high=HIGH))
    loss = aggregation("sequence_mean", micro, 1)(tokens_of.loss)
    loss.backward()
    double = new.detach().double().clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for tokens in case.sequences():
        if not tokens:
            continue
        ratio = torch.exp(double[tokens] - micro.old_logprobs[tokens].double())
        advantage = micro.advantages[tokens[0]].double()
        sign = advantage.sign()
        # The paper's equation 4: the smaller of both, in the direction of the advantage.
        held = ratio.clamp(math.exp(-LOW), math.exp(HIGH))
        chosen = torch.minimum(ratio * sign, held * sign).abs()
        objective = objective + chosen.prod() ** (1 / len(tokens)) * advantage
    want = -objective / micro.num_sequences
    want.backward()
    np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-5)
    torch.testing.assert_close(new.grad, double.grad.float(), rtol=1e-4, atol=1e-7)
    assert tokens_of.clipped.any()


OWN = """
import torch
from burnish.algorithms.base import log_ratio

def reinforce(logprobs, micro_batch, algorithm):
    return -logprobs * micro_batch.advantages

def short(logprobs, micro_batch, algorithm):
    return logprobs[1:]

def constant(logprobs, micro_batch, algorithm):
    return torch.zeros_like(logprobs)

def infinite(logprobs, micro_batch, algorithm):
    return logprobs / 0.0

def wrong(logprobs):
    return logprobs

def array(logprobs, micro_batch, algorithm):
    return logprobs.detach().numpy()

def later(logprobs, micro_batch, algorithm):
    return logprobs if len(logprobs) == 5 else logprobs.nothing
"""


def test_a_function_in_a_file(tmp_path, make_case) -> None:
    (tmp_path / "own.py").write_text(OWN)
    case = make_case(poison=0.0)
    config = AlgorithmConfig(policy_loss=f"{tmp_path}/own.py:reinforce")
    found = load_policy_loss(config)(case.outputs.logprobs, case.micro)
    torch.testing.assert_close(found.loss, -case.outputs.logprobs * case.micro.advantages)
    config = AlgorithmConfig(policy_loss=f"{tmp_path}/own.py:later")
    with pytest.raises(UsageError, match=r"(?s)algorithm\.policy_loss.*own\.py:\d+"):
        load_policy_loss(config)(torch.zeros(4), case.micro)
    for name in ("short", "constant", "infinite", "wrong", "array", "absent"):
        with pytest.raises(UsageError):
            load_policy_loss(AlgorithmConfig(policy_loss=f"{tmp_path}/own.py:{name}"))
