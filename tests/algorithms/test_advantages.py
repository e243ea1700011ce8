from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.advantages import EPSILON
from burnish.algorithms.base import (
    BY_TOKEN,
    ScoredRollouts,
    check_finite,
    load_advantage,
)
from burnish.algorithms.base import advantages as compute
from burnish.algorithms.critic import gae
from burnish.config.algorithm import AdvantageConfig, AdvantageName, PolicyLossName
from burnish.errors import BurnishError, UsageError
from burnish.extend import ADVANTAGES, POLICY_LOSSES


def scored_rollouts(rewards, groups, lengths, penalties=None, **more):
    totals = np.array(rewards, np.float64)
    if penalties is not None:
        totals -= [float(np.sum(each, dtype=np.float64)) for each in penalties]
    told = None if penalties is None else lambda: penalties
    counts = np.array(lengths, np.int64)
    return ScoredRollouts(totals, np.array(groups, np.int64), counts, told, **more)


def by_rollout(found, lengths):
    """Each token's advantage, where a function may have said one of a whole rollout."""
    return [
        np.full(size, row) if row.ndim == 0 else row
        for row, size in zip(found, lengths, strict=True)
    ]


def advantages(kind, rewards, groups, lengths, penalties=None):
    """As `PolicyUpdate` has them, of all rollouts on one rank."""
    scored = scored_rollouts(rewards, groups, lengths, penalties)
    if kind != "reinforce_plus_plus":
        return by_rollout(compute(load_advantage(AdvantageConfig(name=kind)), scored), lengths)
    check_finite(scored.rewards)
    values = [np.zeros(length, np.float32) for length in lengths]
    found = gae(rewards, values, penalties, 1.0, 1.0)
    return found.whitened(found.sums, scored.lengths)[1]


KINDS = [
    "grpo",
    "dr_grpo",
    "grpo_batch_std",
    "rloo",
    "opo",
    "gpg",
    "pass_at_k",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]


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
    result = [slow_rollout(kind, i, totals, groups, lengths) for i in range(n)]
    if kind == "gdpo":  # the whole reward is one part
        result = list((np.array(result) - np.mean(result)) / (np.std(result, ddof=1) + EPSILON))
    by_token = [[value] * length for value, length in zip(result, lengths, strict=True)]
    return whiten(by_token) if kind == "reinforce_plus_plus_baseline" else by_token


def slow_rollout(
    kind: str, i: int, totals: list[float], groups: list[int], lengths: list[int]
) -> float:
    """The advantage of rollout i."""
    n = len(totals)
    mine = [j for j in range(n) if groups[j] == groups[i]]
    group, others = [totals[j] for j in mine], [totals[j] for j in mine if j != i]
    difference = totals[i] - sum(group) / len(group)
    if not others:
        return 0.0
    if kind == "rloo":
        return totals[i] - sum(others) / len(others)
    if kind in ("grpo", "gdpo"):
        return difference / (np.std(group, ddof=1) + EPSILON)
    if kind == "grpo_batch_std":
        return difference / (np.std(totals, ddof=1) + EPSILON)
    if kind == "opo":
        weighted = sum(lengths[j] * totals[j] for j in mine)
        return totals[i] - weighted / sum(lengths[j] for j in mine)
    if kind == "gpg":
        alone = [k for k in range(n) if groups.count(groups[k]) == 1]
        return difference * n / (n - len(alone))
    if kind == "pass_at_k":
        return max(totals[i] - max(others), 0.0)
    return difference


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reinforce_plus_plus"])
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
    assert len(advantages(kind, [], [], [])) == 0
    assert [row.shape for row in advantages(kind, [1.0, 2.0], [0, 0], [0, 0])] == [(0,), (0,)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(BurnishError, match="rollout 1"):
        check_finite(np.array([0.0, bad]))


def test_a_penalty_that_is_not_finite_is_refused() -> None:
    penalties = [np.zeros(1, np.float32), np.array([np.nan], np.float32)]
    with pytest.raises(BurnishError, match="rollout 1"):
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


def test_gdpo_normalises_each_part_by_itself() -> None:
    """A part with a hundredth of the spread counts as much as the other."""
    rng = np.random.default_rng(4)
    right, brief = rng.normal(size=8), rng.normal(scale=0.01, size=8)
    groups = np.arange(8) // 4
    scored = scored_rollouts(
        2 * right + 0.5 * brief - 0.25,
        groups,
        np.ones(8, np.int64),
        parts={"right": right, "brief": brief},
        weights={"right": 2.0, "brief": 0.5},
    )
    total = np.zeros(8)
    for weight, part in ((2.0, right), (0.5, brief)):
        for group in (slice(0, 4), slice(4, 8)):
            own = part[group]
            total[group] += weight * (own - own.mean()) / (own.std(ddof=1) + EPSILON)
    want = (total - total.mean()) / (total.std(ddof=1) + EPSILON)
    got = compute(load_advantage(AdvantageConfig(name="gdpo")), scored)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_remax_compares_with_the_greedy_completion() -> None:
    scored = scored_rollouts(
        [1.0, 0.0, 0.5], [0, 0, 1], [1, 2, 1], greedy_rewards=np.array([0.25, 0.25, 1.0])
    )
    assert compute(load_advantage(AdvantageConfig(name="remax")), scored).tolist() == [
        0.75,
        -0.25,
        -0.5,
    ]
    with pytest.raises(BurnishError):
        advantages("remax", [1.0], [0], [1])


def test_gpg_leaves_groups_without_signal_out_of_its_scale() -> None:
    got = advantages("gpg", [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [1, 1, 1, 1])
    np.testing.assert_allclose(np.concatenate(got), [1.0, -1.0, 0.0, 0.0])


OWN = """
import numpy as np

def scaled(rollouts):
    return 2 * rollouts.rewards

def by_token(rollouts):
    return [np.arange(length) for length in rollouts.lengths]

def short(rollouts):
    return rollouts.rewards[:-1]

def wrong(rollouts):
    return rollouts.reward

def infinite(rollouts):
    return rollouts.rewards / 0.0

def single(rollouts):
    return 1.0

def changing(rollouts):
    rollouts.rewards[:] = 0.0
    return rollouts.rewards

def later(rollouts):
    return rollouts.rewards if "made_up" in rollouts.parts else rollouts.nothing
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_function_in_a_file(own: str) -> None:
    assert [row.tolist() for row in advantages(f"{own}:scaled", [1.0, 2.0], [0, 0], [1, 2])] == [
        [2.0],
        [4.0, 4.0],
    ]
    assert advantages(f"{own}:by_token", [1.0], [0], [3])[0].tolist() == [0.0, 1.0, 2.0]


def test_one_number_for_all_tokens_of_a_rollout_takes_no_memory() -> None:
    scored = scored_rollouts([0.0, 1.0], [0, 0], [1 << 40, 1 << 41])
    assert compute(load_advantage(AdvantageConfig(name="dr_grpo")), scored).tolist() == [-0.5, 0.5]
    assert [len(each) for each in scored.penalties] == [1 << 40, 1 << 41]


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("name", ["short", "wrong", "infinite", "single", "changing", "absent"])
def test_a_function_that_cannot_be_used_is_refused_when_it_is_loaded(own: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"algorithm\.advantage"):
        load_advantage(AdvantageConfig(name=f"{own}:{name}"))


def test_a_function_that_fails_later_is_named_with_the_line(own: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)algorithm\.advantage.*own\.py:\d+"):
        advantages(f"{own}:later", [1.0, 2.0], [0, 0], [1, 2])


def test_the_registry_is_what_the_setting_takes() -> None:
    assert {*ADVANTAGES, *BY_TOKEN} == {*get_args(AdvantageName)}
    assert {*POLICY_LOSSES} == {*get_args(PolicyLossName)}
