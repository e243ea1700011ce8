"""Token selection against the papers' definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.ranks.processes import run_ranks

from burnish.algorithms import policy_loss
from burnish.algorithms.kl import adapted
from burnish.algorithms.token_selection import select_tokens as select
from burnish.config.algorithm import (
    AlgorithmConfig,
    ClipCovSettings,
    KLConfig,
    KLCovSettings,
    PPOSettings,
)
from burnish.distributed.layout import Layout


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, 500)).astype(np.float32) * 2


def covariances(tokens) -> list[float]:
    logprobs, _, advantages = tokens.astype(np.float64)
    return [
        (own - logprobs.mean()) * (credit - advantages.mean())
        for own, credit in zip(logprobs, advantages, strict=True)
    ]


def select_tokens(tokens, config, seed=0, layout=None):
    """Of sequences of 20 tokens each."""
    numbers = np.arange(tokens.shape[1]) // 20
    return select(*tokens, numbers, config, seed, layout or Layout())


def clip_cov(**settings):
    return AlgorithmConfig(policy_loss={"name": "clip_cov", **settings})


def test_kl_cov_takes_the_largest_covariances(tokens) -> None:
    chosen = select_tokens(
        tokens, AlgorithmConfig(policy_loss={"name": "kl_cov", "cov_ratio": 0.02})
    )
    order = np.argsort(covariances(tokens))
    assert set(np.flatnonzero(chosen)) == set(order[-10:])


def test_clip_cov_draws_among_those_between_the_bounds(tokens) -> None:
    config = clip_cov(cov_ratio=0.02, cov_low=1, cov_high=5)
    between = {t for t, each in enumerate(covariances(tokens)) if 1 < each < 5}
    draws = [set(np.flatnonzero(select_tokens(tokens, config, seed))) for seed in (1, 1, 2)]
    assert all(len(draw) == 10 and draw < between for draw in draws)
    assert draws[0] == draws[1] != draws[2]
    few = clip_cov(cov_ratio=1.0, cov_low=1, cov_high=5)
    assert set(np.flatnonzero(select_tokens(tokens, few, 1))) == between


def test_top_entropy_takes_that_share(tokens) -> None:
    chosen = select_tokens(tokens, AlgorithmConfig(top_entropy=0.2))
    assert set(np.flatnonzero(chosen)) == set(np.argsort(tokens[1])[-100:])


def test_of_no_tokens_none_are_chosen() -> None:
    nothing = np.zeros((3, 0), np.float32)
    for config in CONFIGS:
        assert select_tokens(nothing, config).size == 0


CONFIGS = [
    *[AlgorithmConfig(top_entropy=share) for share in (0.01, 0.2, 0.5, 0.99)],
    *[
        AlgorithmConfig(policy_loss={"name": "kl_cov", "cov_ratio": share})
        for share in (0.0002, 0.02, 0.7)
    ],
    *[clip_cov(cov_ratio=r, cov_low=0.5) for r in (0.02, 0.9)],
]


def tied() -> np.ndarray:
    """Few values of either sign, zeros among them, so that most tokens are like others."""
    rng = np.random.default_rng(5)
    return -rng.integers(-2, 3, (3, 400)).astype(np.float32)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_choice_is_numpys_also_among_equal_values(tokens, config) -> None:
    for numbers in (tokens, tied()):
        chosen = select_tokens(numbers, config)
        if config.top_entropy is not None:
            exact = numbers[1].astype(np.float64)
            wanted = exact >= np.quantile(exact, 1 - config.top_entropy)
        else:
            found = np.array(covariances(numbers)).astype(np.float32)
            settings = config.policy_loss.settings
            count = max(1, int(settings["cov_ratio"] * len(found)))
            wanted = np.zeros(len(found), dtype=bool)
            wanted[np.argsort(-found, kind="stable")[:count]] = True
            if config.policy_loss.name == "clip_cov":
                between = (found > settings["cov_low"]) & (found < settings["cov_high"])
                assert chosen.sum() == min(count, between.sum())
                wanted = chosen & between
        assert np.array_equal(chosen, wanted)


def of_rank(layout: Layout) -> list[dict[int, list[bool]]]:
    """By configuration and sequence, where ranks have sequences in turns, the last first; the last rank of three has none."""
    found = []
    numbers = np.arange(400) // 20
    turns = max(1, layout.world - (layout.world == 3))
    mine = [n for n in range(20) if n % turns == layout.rank][::-1]
    places = np.concatenate([np.zeros(0, np.int64), *(np.flatnonzero(numbers == n) for n in mine)])
    for config in CONFIGS:
        rows = tied()[:, places]
        chosen = select(*rows, numbers[places], config, 7, layout)
        found.append({n: chosen[numbers[places] == n].tolist() for n in mine})
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_chooses_the_same(world: int) -> None:
    wanted, shares = of_rank(Layout()), run_ranks(of_rank, world)
    for case, whole in enumerate(wanted):
        found: dict[int, list[bool]] = {}
        for share in shares:
            found |= share[case]
        assert found == whole, CONFIGS[case]


def test_losses_at_selected_tokens(make_case) -> None:
    case = make_case()
    mask = case.micro.loss_mask
    selected = torch.arange(len(mask)) % 3 == 0
    micro = replace(case.micro, selected=selected)
    new = case.outputs.logprobs
    config = AlgorithmConfig()
    plain = policy_loss.ppo(new, micro, config, PPOSettings()).loss
    clipped = policy_loss.clip_cov(new, micro, config, ClipCovSettings())
    torch.testing.assert_close(clipped.loss[mask], torch.where(selected, 0.0, plain)[mask])
    assert clipped.clipped[selected].all()
    ratio = new - micro.old_logprobs
    want = -ratio.exp() * micro.advantages + torch.where(selected, 0.5 * ratio.abs(), 0.0)
    penalized = policy_loss.kl_cov(new, micro, KLCovSettings(cov_penalty=0.5))
    torch.testing.assert_close(penalized.loss[mask], want[mask])


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (5.0, 1.02), (0.0, 0.98), (-3.0, 0.98)]
)
def test_the_coefficient_follows_the_error_within_bounds(kl: float, factor: float) -> None:
    config = KLConfig(target=0.1, horizon=1000)
    assert adapted(0.2, kl, 100, config) == pytest.approx(0.2 * factor)
    assert adapted(0.2, kl, 100, KLConfig()) == 0.2
