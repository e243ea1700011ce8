"""Turn rewards into advantages: how much better each rollout did than expected.

`burnish.algorithms.critic` has `gae`, which needs a critic's values.

Notation: r_i is the reward of rollout i, KL penalties subtracted. mean and std are over the
rollouts of one prompt unless said otherwise. std has Bessel's correction, as in TRL and verl.
"""

from __future__ import annotations

import numpy as np

from burnish.algorithms.base import Array, ScoredRollouts
from burnish.errors import BurnishError

EPSILON = 1e-6
"""Added to every standard deviation that is divided by."""


def grpo(scored: ScoredRollouts) -> Array:
    """A_i = (r_i - mean) / (std + ε) (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return scored.within_groups(standardised, scored.rewards)


def dr_grpo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return scored.within_groups(_centred, scored.rewards)


def grpo_batch_std(scored: ScoredRollouts) -> Array:
    """A_i = (r_i - mean) / (std of all rewards of the step + ε) (arXiv 2508.08221, section 4.1)."""
    spread = scored.rewards.std(ddof=1) if len(scored.rewards) > 1 else 0.0
    scaled: Array = dr_grpo(scored) / (spread + EPSILON)
    return scaled


def rloo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - mean of the group's other rewards (RLOO, arXiv 2402.14740, equation 7)."""

    def leave_one_out(group: Array) -> Array:
        # r_i - (Σ r - r_i) / (n - 1) = (r_i - mean) · n / (n - 1)
        return _centred(group) * len(group) / max(len(group) - 1, 1)

    return scored.within_groups(leave_one_out, scored.rewards)


def opo(scored: ScoredRollouts) -> Array:
    """A_i = r_i - Σ_j l_j r_j / Σ_j l_j over the group, l the lengths (OPO, arXiv 2505.23585, equation 8)."""
    result = np.zeros_like(scored.rewards)
    for members in scored.members():
        rewards, lengths = scored.rewards[members], scored.lengths[members]
        if lengths.any() and rewards.min() < rewards.max():
            result[members] = rewards - np.average(rewards, weights=lengths)
    return result


def gpg(scored: ScoredRollouts) -> Array:
    """A_i = α (r_i - mean) (GPG, arXiv 2504.02546, equation 8).

    α = rollouts / rollouts of groups with unequal rewards.
    """
    centred: Array = dr_grpo(scored)
    informative = scored.within_groups(
        lambda group: np.full(len(group), float(group.any())), centred
    ).sum()
    scaled: Array = centred * (len(centred) / max(informative, 1.0))
    return scaled


def pass_at_k(scored: ScoredRollouts) -> Array:
    """A_i = r_i - second largest reward for the best of a group, else 0 (arXiv 2503.19595, sec. 3).

    The group's sum estimates the gradient of the best of n. Of equals the first is the best, with A
    = 0.
    """

    def best_alone(group: Array) -> Array:
        result = np.zeros_like(group)
        if len(group) > 1:
            second, best = np.argsort(group, kind="stable")[-2:]
            result[best] = group[best] - group[second]
        return result

    return scored.within_groups(best_alone, scored.rewards)


def gdpo(scored: ScoredRollouts) -> Array:
    """Normalise each part of the reward by itself (GDPO, arXiv 2601.05242, equations 4 to 6).

    A_i = Σ_k w_k (r_ik - mean_k) / (std_k + ε), k over the parts of the reward, then standardised
    over the step. KL and length penalties are one more part with weight 1.
    """
    weighted = {name: scored.weights[name] * values for name, values in scored.parts.items()}
    remainder = scored.rewards - sum(weighted.values(), np.zeros_like(scored.rewards))
    remainder[np.abs(remainder) < 1e-9 * (1 + np.abs(scored.rewards))] = 0.0
    total = scored.within_groups(standardised, remainder)
    for name, values in scored.parts.items():
        total = total + scored.weights[name] * scored.within_groups(standardised, values)
    return standardised(total)


def remax(scored: ScoredRollouts) -> Array:
    """A_i = r_i - reward of the greedy completion of the same prompt (ReMax, arXiv 2310.10505, equation 6)."""
    if scored.greedy_rewards is None:
        raise BurnishError(
            "remax has no rewards of greedy completions",
            do="set algorithm.advantage=remax, which has them generated",
        )
    above: Array = scored.rewards - scored.greedy_rewards
    return above


def reinforce_plus_plus(scored: ScoredRollouts) -> list[Array]:
    """A_t = the return R_t, whitened over all tokens of the step (REINFORCE++, arXiv 2501.03262).

    R_t = r_i - Σ_{u ≥ t} penalty_u: the reward comes with the last token, and γ = 1.
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


def _centred(values: Array) -> Array:
    """Subtract the mean; exactly 0 where all are equal, despite rounding."""
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    centred: Array = values - values.mean()
    return centred


def standardised(values: Array) -> Array:
    """Subtract the mean and divide by the standard deviation; 0 where all are equal."""
    centred = _centred(values)
    if not centred.any():
        return centred
    scaled: Array = centred / (values.std(ddof=1) + EPSILON)
    return scaled
