from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.advantages import EPSILON, advantages
from burnish.errors import BurnishError

KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def whiten(rows: list[list[float]]) -> list[list[float]]:
    flat = [value for row in rows for value in row]
    if len(flat) < 2:
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
    return [[(value - mean) / (std + EPSILON) for value in row] for row in rows]


def slow(
    kind: str,
    rewards: list[float],
    groups: list[int],
    lengths: list[int],
    penalties: list[list[float]] | None,
) -> list[list[float]]:
    """The papers' formulas, one rollout at a time."""
    n = len(rewards)
    penalties = penalties or [[0.0] * length for length in lengths]
    if kind == "reinforce_plus_plus":
        returns = []
        for i in range(n):
            token_rewards = [-penalty for penalty in penalties[i]]
            if token_rewards:
                token_rewards[-1] += rewards[i]
            returns.append([sum(token_rewards[t:]) for t in range(lengths[i])])
        return whiten(returns)
    totals = [rewards[i] - sum(penalties[i]) for i in range(n)]
    result = []
    for i in range(n):
        group = [totals[j] for j in range(n) if groups[j] == groups[i]]
        others = [totals[j] for j in range(n) if groups[j] == groups[i] and j != i]
        mean = sum(group) / len(group)
        if kind == "rloo":
            value = totals[i] - sum(others) / len(others) if others else 0.0
        elif kind == "grpo" and others:
            std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
            value = (totals[i] - mean) / (std + EPSILON)
        else:
            value = totals[i] - mean
        result.append([value] * lengths[i])
    return whiten(result) if kind == "reinforce_plus_plus_baseline" else result


@pytest.mark.parametrize("with_penalties", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_slow_transcription(kind: str, with_penalties: bool) -> None:
    rng = np.random.default_rng(1)
    groups = [3, 0, 3, 3, 0, 7, 0, 3]  # interleaved, of sizes 4, 3 and 1
    lengths = [4, 1, 0, 7, 2, 3, 5, 1]  # one empty
    rewards = rng.normal(size=8).tolist()
    penalties = [rng.normal(scale=0.1, size=length).tolist() for length in lengths]
    if not with_penalties:
        penalties = None
    got = advantages(
        kind,
        rewards,
        groups,
        lengths,
        [np.array(p, dtype=np.float32) for p in penalties] if penalties else None,
    )
    want = slow(kind, rewards, groups, lengths, penalties)
    assert [len(row) for row in got] == lengths
    assert all(row.dtype == np.float32 for row in got)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def test_grpo_by_hand() -> None:
    got = advantages("grpo", [0.0, 1.0], [0, 0], [1, 2])
    np.testing.assert_allclose(got[0], [-0.5 / math.sqrt(0.5)], rtol=1e-5)
    np.testing.assert_allclose(got[1], [0.5 / math.sqrt(0.5)] * 2, rtol=1e-5)


def test_rloo_by_hand() -> None:
    got = advantages("rloo", [1.0, 2.0, 6.0], [0, 0, 0], [1, 1, 1])
    np.testing.assert_allclose(np.concatenate(got), [1 - 4, 2 - 3.5, 6 - 1.5])


def test_reinforce_plus_plus_returns_fall_by_the_penalties_still_to_come() -> None:
    penalty = np.array([0.5, 0.25, 0.0], dtype=np.float32)
    (got,) = advantages("reinforce_plus_plus", [1.0], [0], [3], [penalty])
    returns = np.array([0.25, 0.75, 1.0])
    want = (returns - returns.mean()) / (returns.std(ddof=1) + EPSILON)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_whitened_kinds_have_mean_0_and_std_1_over_tokens(kind: str) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 9, 12)
    flat = np.concatenate(advantages(kind, rng.normal(size=12), np.arange(12) // 4, lengths))
    whitened = abs(flat.mean()) < 1e-6 and abs(flat.std(ddof=1) - 1) < 1e-5
    assert whitened == kind.startswith("reinforce")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.1, -3.7, 1e20])
def test_equal_rewards_give_exactly_zero(kind: str, value: float) -> None:
    # 0.1 three times over has a rounded mean that is not 0.1.
    for row in advantages(kind, [value] * 6, [0, 0, 0, 1, 1, 1], [2, 3, 1, 1, 1, 4]):
        assert not row.any()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_have_no_signal(kind: str) -> None:
    for row in advantages(kind, [1.0, 5.0, -2.0], [0, 1, 2], [2, 2, 2]):
        assert not row.any()


def test_reinforce_plus_plus_needs_no_groups() -> None:
    a = advantages("reinforce_plus_plus", [1.0, 5.0], [0, 1], [2, 2])
    b = advantages("reinforce_plus_plus", [1.0, 5.0], [0, 0], [2, 2])
    np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))
    assert a[0][0] < 0 < a[1][0]


def test_an_empty_completion_counts_in_its_groups_mean() -> None:
    empty, full = advantages("dr_grpo", [0.0, 1.0], [0, 0], [0, 2])
    assert empty.shape == (0,)
    np.testing.assert_array_equal(full, [0.5, 0.5])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_nothing_out(kind: str) -> None:
    assert advantages(kind, [], [], []) == []
    assert [row.shape for row in advantages(kind, [1.0, 2.0], [0, 0], [0, 0])] == [(0,), (0,)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(BurnishError, match="rollout 1 "):
        advantages("grpo", [0.0, bad], [0, 0], [1, 1])


def test_a_penalty_that_is_not_finite_is_refused() -> None:
    penalties = [np.zeros(1, np.float32), np.array([np.nan], np.float32)]
    with pytest.raises(BurnishError, match="rollout 1 "):
        advantages("reinforce_plus_plus", [0.0, 1.0], [0, 0], [1, 1], penalties)


rollouts = st.lists(
    st.tuples(st.floats(-1e30, 1e30, allow_nan=False), st.integers(0, 3), st.integers(0, 5)),
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@given(rows=rollouts)
def test_finite_rewards_give_finite_advantages_of_the_right_length(kind: str, rows: list) -> None:
    rewards, groups, lengths = (
        (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    )
    got = advantages(kind, rewards, groups, lengths)
    assert [len(row) for row in got] == lengths
    assert all(np.isfinite(row).all() for row in got)


@given(rows=rollouts.filter(bool), seed=st.integers(0, 100))
def test_the_order_of_rollouts_does_not_matter(rows: list, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    rewards, groups, lengths = (np.array(column) for column in zip(*rows, strict=True))
    plain = advantages("grpo", rewards, groups, lengths)
    shuffled = advantages("grpo", rewards[order], groups[order], lengths[order])
    for place, i in enumerate(order):
        np.testing.assert_allclose(shuffled[place], plain[i], rtol=1e-4, atol=1e-4)
