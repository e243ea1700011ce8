"""Turn rewards into advantages.

r_i is a rollout's reward less its penalties. mean and std, with Bessel's correction, are over its
prompt's rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from burnish.algorithms.base import Array, ScoredRollouts
from burnish.errors import BurnishError

EPSILON = 1e-6
"""Added to every standard deviation in a denominator."""


def grpo(scored: ScoredRollouts) -> Array:
    """A_i = (r_i - mean) / (std + ε) (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return scored.in_rows(_standardise, scored.rewards)


def dr_grpo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return scored.in_rows(_centre, scored.rewards)


def grpo_batch_std(scored: ScoredRollouts) -> Array:
    """A_i = (r_i - mean) / (std of the step's rewards + ε) (arXiv 2508.08221, section 4.1)."""
    spread = scored.rewards.std(ddof=1) if len(scored.rewards) > 1 else 0.0
    return dr_grpo(scored) / (spread + EPSILON)


def rloo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean of the group's other rewards (RLOO, arXiv 2402.14740, equation 7)."""

    def leave_one_out(rows: Array) -> Array:
        # r_i - (Σ r - r_i) / (n - 1) = (r_i - mean) · n / (n - 1)
        size = rows.shape[-1]
        return _centre(rows) * size / max(size - 1, 1)

    return scored.in_rows(leave_one_out, scored.rewards)


def opo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - Σ_j l_j r_j / Σ_j l_j over the group's lengths l (OPO, arXiv 2505.23585, equation 8)."""
    result = np.zeros_like(scored.rewards)
    for members in scored.members():
        rewards = scored.rewards[members]
        lengths = scored.lengths[members]
        tokens = lengths.sum(axis=-1, keepdims=True)
        baselines = (rewards * lengths).sum(axis=-1, keepdims=True) / np.maximum(tokens, 1)
        result[members] = np.where(_all_equal(rewards) | (tokens == 0), 0.0, rewards - baselines)
    return result


def gpg(scored: ScoredRollouts) -> Array:
    """A_i = α (r_i - mean) (GPG, arXiv 2504.02546, equation 8).

    α = rollouts / rollouts of groups with unequal rewards.
    """
    centred: Array = dr_grpo(scored)
    informative = scored.in_rows(
        lambda rows: np.ones_like(rows) * rows.any(axis=-1, keepdims=True), centred
    ).sum()
    return centred * (len(centred) / max(informative, 1.0))


def pass_at_k(scored: ScoredRollouts) -> Array:
    """A_i = r_i - second largest reward for the best of a group, else 0 (arXiv 2503.19595, sec. 3)."""

    def best_alone(rows: Array) -> Array:
        result = np.zeros_like(rows)
        if rows.shape[-1] > 1:
            best = np.argsort(rows, axis=-1, kind="stable")[:, -1:]
            ranked = np.sort(rows, axis=-1)
            np.put_along_axis(result, best, ranked[:, -1:] - ranked[:, -2:-1], axis=-1)
        return result

    return scored.in_rows(best_alone, scored.rewards)


def gdpo(scored: ScoredRollouts) -> Array:
    """A_i = Σ_k w_k (r_ik - mean_k) / (std_k + ε), standardised over the step (GDPO, arXiv 2601.05242, equations 4 to 6).

    k runs over the reward's parts. mean_k and std_k are over the rollouts that have the part; it adds nothing to others. Penalties
    form one more part, of weight 1.
    """
    weighted = {
        name: scored.weights[name] * np.nan_to_num(values) for name, values in scored.parts.items()
    }
    remainder = scored.rewards - sum(weighted.values(), np.zeros_like(scored.rewards))
    # Rounding alone would be standardised to advantages of about 1.
    remainder[np.abs(remainder) < 1e-9 * (1 + np.abs(scored.rewards))] = 0.0
    total = scored.in_rows(_standardise, remainder)
    for name, values in scored.parts.items():
        there = np.flatnonzero(~np.isnan(values))
        judged = ScoredRollouts(values[there], scored.groups[there], scored.lengths[there])
        total[there] += scored.weights[name] * grpo(judged)
    return _standardise(total)


def remax(scored: ScoredRollouts) -> Array:
    """A_i = r_i - reward of the prompt's greedy completion (ReMax, arXiv 2310.10505, equation 6)."""
    if scored.greedy_rewards is None:
        raise BurnishError(
            "remax has no rewards of greedy completions",
            do="set algorithm.advantage=remax, which has them generated",
        )
    return scored.rewards - scored.greedy_rewards


def reinforce_plus_plus_baseline(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean, whitened over all tokens of the step (arXiv 2501.03262)."""
    values = dr_grpo(scored)
    mean, scale = whitening(token_sums(values[:, None]), scored.lengths)
    return (values - mean) * scale


def token_sums(rows: Iterable[Array]) -> Array:
    """Return x_0, Σ (x_t - x_0) and Σ (x_t - x_0)² of each row x, [n, 3]."""
    sums = []
    for row in rows:
        apart = row - row[:1]
        sums.append((row[0] if len(row) else 0.0, apart.sum(), np.square(apart).sum()))
    return np.array(sums, np.float64).reshape(-1, 3)


def pooled(sums: Array, lengths: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Return mean and sum of squared deviations of all rows' tokens; exactly 0 if all are equal."""
    first, apart, squares = sums[lengths > 0].T
    sizes = lengths[lengths > 0]
    if not len(first):
        return 0.0, 0.0
    mean = float((sizes * first + apart).sum() / sizes.sum())
    if not squares.any() and (first == first[0]).all():
        return mean, 0.0
    offset = first - mean
    deviations = squares + 2 * apart * offset + sizes * np.square(offset)
    return mean, max(float(deviations.sum()), 0.0)


def whitening(sums: Array, lengths: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Return mean and 1 / (std + ε) of all rows' tokens; 0 if all are equal."""
    mean, squares = pooled(sums, lengths)
    if not squares:
        return mean, 0.0
    return mean, 1 / (float(np.sqrt(squares / (lengths.sum() - 1))) + EPSILON)


def _all_equal(values: Array) -> npt.NDArray[np.bool_]:
    return (values == values[..., :1]).all(axis=-1, keepdims=True)


def _centre(values: Array) -> Array:
    """Subtract each row's mean; exactly 0 where all are equal, despite rounding."""
    if values.size == 0:
        return values
    return np.where(_all_equal(values), 0.0, values - values.mean(axis=-1, keepdims=True))


def _standardise(values: Array) -> Array:
    """Subtract each row's mean and divide by its std; 0 where all are equal."""
    # Without deviations there is nothing to divide. In a group of one, variance would be 0 / 0.
    centred = _centre(values)
    if not centred.any():
        return centred
    squares = np.square(centred).sum(axis=-1, keepdims=True)
    return centred / (np.sqrt(squares / (values.shape[-1] - 1)) + EPSILON)
