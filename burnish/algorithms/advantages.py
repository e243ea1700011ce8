"""Turn rewards into advantages.

r_i is a rollout's reward less its penalties. mean and std, with Bessel's correction, are over its
prompt's rollouts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from burnish.algorithms.base import Array, ScoredRollouts
from burnish.errors import BurnishError

EPSILON = 1e-6
"""Added to every standard deviation that is divided by."""


def grpo(scored: ScoredRollouts) -> Array:
    """A_i = (r_i - mean) / (std + ε) (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return scored.in_rows(standardised, scored.rewards)


def dr_grpo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return scored.in_rows(_centred, scored.rewards)


def grpo_batch_std(scored: ScoredRollouts) -> Array:
    """A_i = (r_i - mean) / (std of the step's rewards + ε) (arXiv 2508.08221, section 4.1)."""
    spread = scored.rewards.std(ddof=1) if len(scored.rewards) > 1 else 0.0
    scaled: Array = dr_grpo(scored) / (spread + EPSILON)
    return scaled


def rloo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean of the group's other rewards (RLOO, arXiv 2402.14740, equation 7)."""

    def leave_one_out(rows: Array) -> Array:
        # r_i - (Σ r - r_i) / (n - 1) = (r_i - mean) · n / (n - 1)
        size = rows.shape[-1]
        scaled: Array = _centred(rows) * size / max(size - 1, 1)
        return scaled

    return scored.in_rows(leave_one_out, scored.rewards)


def opo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - Σ_j l_j r_j / Σ_j l_j over the group's lengths l (OPO, arXiv 2505.23585, equation 8)."""
    result = np.zeros_like(scored.rewards)
    for members in scored.members():
        rewards, lengths = scored.rewards[members], scored.lengths[members]
        tokens = lengths.sum(axis=-1, keepdims=True)
        baselines = (rewards * lengths).sum(axis=-1, keepdims=True) / np.maximum(tokens, 1)
        result[members] = np.where(_alike(rewards) | (tokens == 0), 0.0, rewards - baselines)
    return result


def gpg(scored: ScoredRollouts) -> Array:
    """A_i = α (r_i - mean) (GPG, arXiv 2504.02546, equation 8).

    α = rollouts / rollouts of groups with unequal rewards.
    """
    centred: Array = dr_grpo(scored)
    informative = scored.in_rows(
        lambda rows: np.ones_like(rows) * rows.any(axis=-1, keepdims=True), centred
    ).sum()
    scaled: Array = centred * (len(centred) / max(informative, 1.0))
    return scaled


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

    k runs over the reward's parts. Penalties are one more, of weight 1.
    """
    weighted = {name: scored.weights[name] * values for name, values in scored.parts.items()}
    remainder = scored.rewards - sum(weighted.values(), np.zeros_like(scored.rewards))
    remainder[np.abs(remainder) < 1e-9 * (1 + np.abs(scored.rewards))] = 0.0
    total = scored.in_rows(standardised, remainder)
    for name, values in scored.parts.items():
        total = total + scored.weights[name] * scored.in_rows(standardised, values)
    return standardised(total)


def remax(scored: ScoredRollouts) -> Array:
    """A_i = r_i - reward of the prompt's greedy completion (ReMax, arXiv 2310.10505, equation 6)."""
    if scored.greedy_rewards is None:
        raise BurnishError(
            "remax has no rewards of greedy completions",
            do="set algorithm.advantage=remax, which has them generated",
        )
    above: Array = scored.rewards - scored.greedy_rewards
    return above


def reinforce_plus_plus(scored: ScoredRollouts) -> list[Array]:
    """A_t = R_t, whitened over all tokens of the step (REINFORCE++, arXiv 2501.03262).

    R_t is the reward before KL, less the KL penalties from token t on.
    """
    own = scored.rewards + np.array([penalty.sum() for penalty in scored.penalties])
    returns = [
        reward - penalty[::-1].cumsum()[::-1]
        for reward, penalty in zip(own, scored.penalties, strict=True)
    ]
    return np.split(standardised(np.concatenate(returns)), scored.lengths.cumsum()[:-1])


def reinforce_plus_plus_baseline(scored: ScoredRollouts) -> list[Array]:
    """A_i = r_i - mean, whitened over all tokens of the step (arXiv 2501.03262)."""
    flat = standardised(np.repeat(dr_grpo(scored), scored.lengths))
    return np.split(flat, scored.lengths.cumsum()[:-1])


def _alike(values: Array) -> npt.NDArray[np.bool_]:
    alike: npt.NDArray[np.bool_] = (values == values[..., :1]).all(axis=-1, keepdims=True)
    return alike


def _centred(values: Array) -> Array:
    """Subtract each row's mean; exactly 0 where all are equal, despite rounding."""
    if values.size == 0:
        return values
    return np.where(_alike(values), 0.0, values - values.mean(axis=-1, keepdims=True))


def standardised(values: Array) -> Array:
    """Subtract each row's mean and divide by its std; 0 where all are equal."""
    centred = _centred(values)
    if not centred.any():
        return centred
    scaled: Array = centred / (values.std(axis=-1, ddof=1, keepdims=True) + EPSILON)
    return scaled
