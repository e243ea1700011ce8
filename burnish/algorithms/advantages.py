"""Turn rewards into advantages: how much better each rollout did than expected.

An advantage function takes the `ScoredRollouts` of a step. It returns one number per rollout, or
one array per rollout with a number per token. It runs on the host in fp64. `gae` needs a critic's
values instead (`burnish.algorithms.critic`).

Notation: r_i is the reward of rollout i, KL penalties subtracted. mean and std are over the
rollouts of one prompt unless said otherwise. std has Bessel's correction, as in TRL and verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from burnish.algorithms import ADVANTAGES
from burnish.errors import BurnishError, UsageError
from burnish.functions import load_function
from burnish.records import Floats

EPSILON = 1e-6
"""Added to every standard deviation that is divided by."""
LARGEST_REWARD = 1e30
"""Rewards beyond it are refused: their differences would not fit in fp32."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollouts:
    """The rollouts of a step, as an advantage function gets them: N rollouts, host arrays."""

    rewards: Array
    """[N] fp64. KL penalties and the penalty for length are subtracted."""
    groups: npt.NDArray[np.int64]
    """[N]. Rollouts of one prompt have equal numbers."""
    lengths: npt.NDArray[np.int64]
    """[N] tokens of each completion; 0 is possible."""
    penalties: tuple[Array, ...]
    """[length] each: KL in the reward per token, coefficient included; zeros without it."""
    parts: Mapping[str, Array] = field(default_factory=dict)
    """[N] by reward function or model: its own value, unweighted; 0 where it failed."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part in the reward."""
    greedy_rewards: Array | None = None
    """[N] rewards of the greedy completion of the same prompt; `remax` alone has them generated."""

    @classmethod
    def of(
        cls,
        rewards: Sequence[float] | npt.NDArray[np.floating],
        groups: Sequence[int] | npt.NDArray[np.integer],
        lengths: Sequence[int] | npt.NDArray[np.integer],
        token_penalties: Sequence[Floats] | None = None,
        **more: Any,
    ) -> ScoredRollouts:
        """Subtract `token_penalties` from rewards. Raises `BurnishError` for a reward that is not finite."""
        sizes = np.asarray(lengths, dtype=np.int64)
        given = token_penalties or [np.zeros(size, dtype=np.float32) for size in sizes]
        penalties = tuple(np.asarray(penalty, dtype=np.float64) for penalty in given)
        totals = np.asarray(rewards, dtype=np.float64) - np.array([p.sum() for p in penalties])
        check_finite(totals)
        return cls(totals, np.asarray(groups, dtype=np.int64), sizes, penalties, **more)

    def within_groups(self, formula: Callable[[Array], Array], values: Array) -> Array:
        """Apply `formula` to the `values` [N] of each group by itself."""
        result = np.zeros_like(values)
        for members in self.members():
            result[members] = formula(values[members])
        return result

    def members(self) -> list[npt.NDArray[np.int64]]:
        """Return the indices of the rollouts of each group."""
        _, membership = np.unique(self.groups, return_inverse=True)
        order = np.argsort(membership, kind="stable")
        return np.split(order, np.bincount(membership).cumsum()[:-1])


Advantage = Callable[[ScoredRollouts], "npt.ArrayLike | Sequence[npt.ArrayLike]"]
"""[N] numbers, one per rollout; or N arrays, each with one number per token of the completion."""


def load_advantage(name: str) -> Advantage:
    """Return the function that `algorithm.advantage` names.

    Calls a user's function once on made-up rollouts. Raises `UsageError` if it does not exist or
    fails there.
    """
    function = load_function(name, "algorithm.advantage", ADVANTAGES)
    if name not in ADVANTAGES:
        rewards, groups, lengths = [1.0, 0.0, 0.5, 0.25], [0, 0, 1, 1], [2, 3, 1, 2]
        made_up = ScoredRollouts.of(
            rewards,
            groups,
            lengths,
            parts={"made_up": np.array(rewards)},
            weights={"made_up": 1.0},
            greedy_rewards=np.full(4, 0.5),
        )
        try:
            advantages(function, made_up)
        except Exception as error:
            raise UsageError(
                f"algorithm.advantage: {name} failed on 4 made-up rollouts",
                have=getattr(error, "problem", f"{type(error).__name__}: {error}"),
                want="advantages of ScoredRollouts: [N] numbers, or N arrays with one per token",
                do="correct the function",
            ) from error
    return function


def advantages(function: Advantage, scored: ScoredRollouts) -> list[Floats]:
    """Return each completion token's advantage, one fp32 array per rollout.

    Raises `BurnishError` if the function returns other shapes or non-finite numbers.
    """
    lengths = scored.lengths
    if not len(lengths):
        return []
    found: Any = function(scored)
    if len(found) == len(lengths) and all(np.ndim(each) == 0 for each in found):
        found = np.repeat(np.asarray(found, dtype=np.float64), lengths)
        found = np.split(found, lengths.cumsum()[:-1])
    shapes = [np.shape(each) for each in found]
    if shapes != [(length,) for length in lengths]:
        raise BurnishError(
            "the advantage function returned other shapes than it should",
            have=f"{len(shapes)} entries, the first of shape {shapes[0] if shapes else ()}",
            want=f"{len(lengths)} numbers, or {len(lengths)} arrays of as many numbers as tokens",
            do="correct the function of algorithm.advantage",
        )
    tokens = [np.asarray(each, dtype=np.float32) for each in found]
    if not all(np.isfinite(each).all() for each in tokens):
        raise BurnishError(
            "the advantage function returned numbers that are not finite",
            have="NaN or infinity",
            want="finite fp32 numbers",
            do="correct the function of algorithm.advantage",
        )
    return tokens


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


def check_finite(totals: Array) -> None:
    """Refuse rewards [N], penalties included, that are not finite or beyond `LARGEST_REWARD`."""
    bad = np.flatnonzero(~(np.abs(totals) <= LARGEST_REWARD))
    if bad.size:
        raise BurnishError(
            f"The reward of rollout {bad[0]} cannot be learned from.",
            have=f"{totals[bad[0]]} ({bad.size} of {totals.size} rollouts)",
            want=f"a finite number of at most {LARGEST_REWARD:g}",
            do="look at the reward function and, with KL in the reward, at the log-probs",
        )
