"""Advantages of turns, against the papers' formulas in plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from burnish.algorithms.advantages import EPSILON
from burnish.algorithms.base import ScoredRollouts, advantages, load_advantage
from burnish.algorithms.critic import gae
from burnish.config.algorithm import AdvantageConfig
from burnish.records.samples import Turn

GROUPS = np.array([0, 0, 0, 1, 1, 1])
TURNS = [
    (Turn(2, 0.5, 7), Turn(1, 1.0, 8), Turn(3, 0.0, 9)),
    (Turn(1, 0.0, 7), Turn(4, 2.0, 9)),
    (Turn(3, 1.0, 7),),
    (Turn(1, 1.0, 7), Turn(2, 1.0, 8), Turn(1, 1.0, 8)),
    (Turn(2, 0.0, 5), Turn(1, 0.25, 8)),
    (),
]
"""The last rollout is no conversation."""
LENGTHS = np.array([6, 5, 3, 4, 3, 2])
FURTHER = np.array([0.0, 0.125, 0.0, -0.5, 0.0, 0.75])
"""What a reward function adds, which the last turn gets."""
REWARDS = np.array([sum(turn.reward for turn in own) for own in TURNS]) + FURTHER


def scored():
    return ScoredRollouts(REWARDS, GROUPS, LENGTHS, turns_of_all=lambda: TURNS)


def returns(gamma):
    """By rollout and turn."""
    rows = []
    for own, further, length in zip(TURNS, FURTHER, LENGTHS, strict=True):
        paid = [turn.reward for turn in own or [Turn(int(length), 0.0, 0)]]
        paid[-1] += further
        rows.append(
            [
                sum(gamma ** (later - k) * paid[later] for later in range(k, len(paid)))
                for k in range(len(paid))
            ]
        )
    return rows


def standard(value, others):
    if len({*others}) == 1:
        return 0.0
    return (value - np.mean(others)) / (np.std(others, ddof=1) + EPSILON)


def on_tokens(i, of_turns):
    sizes = [turn.tokens for turn in TURNS[i]] or [LENGTHS[i]]
    return np.repeat(of_turns, sizes)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_turn_grpo_compares_the_same_turn_of_a_group(gamma):
    function = load_advantage(AdvantageConfig(name="turn_grpo", gamma=gamma))
    own = returns(gamma)
    for i, row in enumerate(advantages(function, scored())):
        group = [own[j] for j in range(6) if GROUPS[j] == GROUPS[i]]
        wanted = [
            standard(value, [other[k] for other in group if len(other) > k])
            for k, value in enumerate(own[i])
        ]
        np.testing.assert_allclose(row, on_tokens(i, wanted), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("gamma", "weight"), [(1.0, 1.0), (0.5, 0.25)])
def test_gigpo_compares_the_same_state_of_a_group(gamma, weight):
    function = load_advantage(AdvantageConfig(name="gigpo", gamma=gamma, weight=weight))
    own = returns(gamma)
    states = [[turn.state for turn in turns] or [0] for turns in TURNS]
    for i, row in enumerate(advantages(function, scored())):
        group = [j for j in range(6) if GROUPS[j] == GROUPS[i]]
        whole = standard(REWARDS[i], [REWARDS[j] for j in group])
        wanted = [
            whole
            + weight
            * standard(
                value,
                [
                    other
                    for j in group
                    for state, other in zip(states[j], own[j], strict=True)
                    if state == states[i][k]
                ],
            )
            for k, value in enumerate(own[i])
        ]
        np.testing.assert_allclose(row, on_tokens(i, wanted), rtol=1e-6, atol=1e-7)


def test_without_conversations_turns_are_whole_completions():
    plain = ScoredRollouts(REWARDS, GROUPS, LENGTHS)
    grpo = advantages(load_advantage(AdvantageConfig()), plain)
    rows = advantages(load_advantage(AdvantageConfig(name="turn_grpo")), plain)
    for row, value in zip(rows, grpo, strict=True):
        assert (row == value).all()


def test_gae_pays_a_turn_at_its_last_token():
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(length).astype(np.float32) for length in LENGTHS]
    penalties = [rng.standard_normal(length).astype(np.float32) for length in LENGTHS]
    estimates = gae(REWARDS, values, penalties, 0.9, 0.8, TURNS)
    for i, row in enumerate(estimates.advantages):
        paid = -penalties[i].astype(float)
        ends = np.cumsum([turn.tokens for turn in TURNS[i]] or [LENGTHS[i]]) - 1
        for end, turn in zip(ends, TURNS[i], strict=False):
            paid[end] += turn.reward
        paid[-1] += FURTHER[i]
        v = [*values[i].astype(float), 0.0]
        deltas = [r + 0.9 * after - now for r, (now, after) in zip(paid, pairwise(v), strict=True)]
        wanted = [
            sum((0.9 * 0.8) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
            for t in range(len(deltas))
        ]
        np.testing.assert_allclose(row, wanted, rtol=1e-6, atol=1e-9)
