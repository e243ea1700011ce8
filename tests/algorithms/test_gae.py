from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.advantages import EPSILON
from burnish.algorithms.critic import Estimates, gae, value_stats


def slow(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Schulman et al., equations 11, 12 and 16, as sums over the tokens of the mask; all arrays [N, T].

    Advantages as they are before whitening, and the returns.
    """
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for i in range(len(values)):
        chosen = [t for t in range(values.shape[1]) if mask[i, t]]
        deltas = []
        for k, t in enumerate(chosen):
            behind = values[i, chosen[k + 1]] if k + 1 < len(chosen) else 0.0
            deltas.append(rewards[i, t] + gamma * behind - values[i, t])
        for k, t in enumerate(chosen):
            terms = [(gamma * lam) ** step * delta for step, delta in enumerate(deltas[k:])]
            advantages[i, t] = math.fsum(terms)
            returns[i, t] = advantages[i, t] + values[i, t]
    return advantages, returns


def lengths_of(found: Estimates) -> np.ndarray:
    return np.array([len(row) for row in found.returns], np.int64)


def whitened(found: Estimates) -> list[np.ndarray]:
    """As if one rank had all of it."""
    means, rows = found.whitened(found.sums, lengths_of(found))
    for mean, row in zip(means, rows, strict=True):
        assert not len(row) or mean == pytest.approx(row.mean(), abs=1e-5)
    return rows


def stats_of(found: Estimates) -> dict[str, float]:
    return value_stats(found.sums, lengths_of(found)).values_by_name()


def whiten(flat: np.ndarray) -> np.ndarray:
    return (flat - flat.mean()) / (flat.std(ddof=1) + EPSILON)


@pytest.mark.parametrize("with_penalties", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.5, 1.0)])
def test_equals_the_slow_transcription(gamma: float, lam: float, with_penalties: bool) -> None:
    rng = np.random.default_rng(2)
    mask = rng.random((7, 11)) < 0.6  # tokens of others between those that were chosen
    mask[3] = False  # an empty completion
    mask[4] = np.arange(11) == 5
    values = rng.normal(size=mask.shape)
    penalties = rng.normal(scale=0.1, size=mask.shape) * with_penalties
    scores = rng.normal(size=len(mask))
    rewards = -penalties
    for i in range(len(mask)):
        if mask[i].any():
            rewards[i, np.flatnonzero(mask[i])[-1]] += scores[i]
    got = gae(
        scores,
        [v[m].astype(np.float32) for v, m in zip(values, mask, strict=True)],
        [p[m].astype(np.float32) for p, m in zip(penalties, mask, strict=True)]
        if with_penalties
        else None,
        gamma,
        lam,
    )
    advantages, returns = slow(rewards, values, mask, gamma, lam)
    rows = whitened(got)
    assert [len(row) for row in rows] == mask.sum(1).tolist()
    assert [len(row) for row in got.returns] == mask.sum(1).tolist()
    wanted = whiten(advantages[mask])
    np.testing.assert_allclose(np.concatenate(rows), wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.concatenate(got.returns), returns[mask], rtol=2e-5, atol=2e-5)
    assert all(row.dtype == np.float32 for row in [*rows, *got.returns])


rows = st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), min_size=1, max_size=5)


@given(rows, st.floats(0, 1))
def test_with_lambda_1_and_no_discount_the_return_is_the_reward(
    values: list[list[float]], reward: float
) -> None:
    arrays = [np.array(row, dtype=np.float32) for row in values]
    got = gae([reward] * len(values), arrays, None, 1.0, 1.0)
    for row in got.returns:
        np.testing.assert_allclose(row, reward, atol=1e-3)


@given(rows)
def test_with_lambda_0_the_return_is_one_step_ahead(values: list[list[float]]) -> None:
    arrays = [np.array(row, dtype=np.float32) for row in values]
    got = gae([0.5] * len(values), arrays, None, 1.0, 0.0)
    for row, returns in zip(arrays, got.returns, strict=True):
        np.testing.assert_allclose(returns, [*row[1:], 0.5][: len(row)], atol=1e-4)


def test_a_perfect_critic_leaves_nothing_to_explain() -> None:
    values = [np.full(3, 2.0, np.float32), np.full(2, -1.0, np.float32)]
    got = gae([2.0, -1.0], values, None, 1.0, 0.95)
    assert not np.concatenate(whitened(got)).any()
    assert stats_of(got) == {
        "values/mean": pytest.approx(0.8),
        "returns/mean": pytest.approx(0.8),
        "explained_var": pytest.approx(1.0),
    }


def test_the_explained_variance_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    values = [rng.normal(size=n).astype(np.float32) for n in (4, 0, 9)]
    returns = [rng.normal(size=n).astype(np.float32) for n in (4, 0, 9)]
    v, r = np.concatenate(values), np.concatenate(returns)
    above = [(r - v).astype(np.float64) for r, v in zip(returns, values, strict=True)]
    found = stats_of(Estimates(above, returns))["explained_var"]
    assert found == pytest.approx(1 - (r - v).var() / r.var(), rel=1e-5)
    flat = stats_of(Estimates([np.zeros(3)], [np.ones(3, np.float32)]))
    assert math.isnan(flat["explained_var"])


def test_of_nothing() -> None:
    assert whitened(gae([], [], None, 1.0, 1.0)) == []
    empty = np.zeros(0, np.float32)
    got = gae([1.0, 2.0], [empty, empty], None, 1.0, 1.0)
    assert [len(row) for row in whitened(got) + got.returns] == [0] * 4
    assert stats_of(got) == {}


def test_whitening_does_not_lose_a_spread_far_from_0_and_first_tokens_apart() -> None:
    rng = np.random.default_rng(3)
    rows = [1e6 + 1e-3 * rng.normal(size=n) for n in (5, 1, 30)]
    rows[0][0] += 1.0
    found = whitened(Estimates(rows, [row.astype(np.float32) for row in rows]))
    np.testing.assert_allclose(np.concatenate(found), whiten(np.concatenate(rows)), rtol=1e-5)
