"""From rewards to advantages: how much better than its fellows each rollout did.

Computed on the host in fp64 over all rollouts of a step, because baselines and whitening need the
whole batch. What comes out is finite and fp32, whatever the rewards. Left out: advantages from a critic (`burnish.algorithms.gae`).

Throughout, r_i is the reward of rollout i, G(i) its group (the n rollouts of the same prompt),
mean and std run over a group unless said otherwise, and std has Bessel's correction, as in TRL and verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from burnish.errors import BurnishError
from burnish.records import Floats

AdvantageKind = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
"""The estimators, by their name in the configuration."""

EPSILON = 1e-6
"""Added to every standard deviation that is divided by."""
LARGEST_REWARD = 1e30
"""Rewards beyond it are refused: their differences would not fit in fp32."""

_Array = npt.NDArray[np.float64]


def advantages(
    kind: AdvantageKind,
    rewards: Sequence[float] | npt.NDArray[np.floating],
    groups: Sequence[int] | npt.NDArray[np.integer],
    lengths: Sequence[int] | npt.NDArray[np.integer],
    token_penalties: Sequence[Floats] | None = None,
) -> list[Floats]:
    """The advantage of every completion token: per rollout one fp32 array of the completion's length.

    `rewards` [N], `groups` [N] (equal ids are one group, in any order), `lengths` [N] in tokens.
    `token_penalties`, one array per rollout, is subtracted from the reward of each token (KL in the
    reward, coefficient included; see `burnish.algorithms.kl.kl_penalty`); r_i below is then the sum
    over the rollout. Every token of rollout i gets A_i:

    - grpo (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean) / (std + ε)
    - dr_grpo (arXiv 2503.20783, section 3.2): A_i = r_i - mean
    - rloo (arXiv 2402.14740, equation 7): A_i = r_i - mean of the group's other rewards
    - reinforce_plus_plus_baseline (arXiv 2501.03262): A_i = r_i - mean, whitened over all tokens of the batch

    and in reinforce_plus_plus (arXiv 2501.03262) each token t its return R_t, whitened over all tokens
    of the batch, where R_t = r_i - Σ_{u ≥ t} penalty_u: the reward comes with the last token, and γ = 1.

    A group of one has no baseline: 0 in grpo, dr_grpo and rloo. Equal rewards give exactly 0. An
    empty completion counts in its group's mean and gets an empty array. Completions cut at their
    limit are treated like any other. Raises `BurnishError` for a reward that is not finite.
    """
    scores: _Array = np.asarray(rewards, dtype=np.float64)
    lengths = np.asarray(lengths, dtype=np.int64)
    if token_penalties is None:
        penalties = [np.zeros(length, dtype=np.float64) for length in lengths]
    else:
        penalties = [np.asarray(penalty, dtype=np.float64) for penalty in token_penalties]
    totals = scores - np.array([penalty.sum() for penalty in penalties], dtype=np.float64)
    check_finite(totals)
    if kind == "reinforce_plus_plus":
        returns = [
            reward - penalty[::-1].cumsum()[::-1]
            for reward, penalty in zip(scores, penalties, strict=True)
        ]
        flat = standardised(np.concatenate([np.zeros(0), *returns]))
    elif kind == "reinforce_plus_plus_baseline":
        flat = standardised(np.repeat(_within_groups("dr_grpo", totals, groups), lengths))
    else:
        flat = np.repeat(_within_groups(kind, totals, groups), lengths)
    return np.split(flat.astype(np.float32), lengths.cumsum()[:-1]) if len(lengths) else []


def _within_groups(
    kind: AdvantageKind, rewards: _Array, groups: Sequence[int] | npt.NDArray[np.integer]
) -> _Array:
    result = np.zeros_like(rewards)
    _, membership = np.unique(np.asarray(groups), return_inverse=True)
    order = np.argsort(membership, kind="stable")
    for members in np.split(order, np.bincount(membership).cumsum()[:-1]):
        group = rewards[members]
        if kind == "grpo":
            result[members] = standardised(group)
        elif kind == "rloo":
            # r_i - (Σ r - r_i) / (n - 1) = (r_i - mean) · n / (n - 1)
            result[members] = _centred(group) * len(group) / max(len(group) - 1, 1)
        else:
            result[members] = _centred(group)
    return result


def _centred(values: _Array) -> _Array:
    """Minus their mean; exactly 0 where all are equal, which rounding of the mean would miss."""
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    centred: _Array = values - values.mean()
    return centred


def standardised(values: _Array) -> _Array:
    """Minus their mean, over their standard deviation; 0 where all are equal."""
    centred = _centred(values)
    if not centred.any():
        return centred
    standardised: _Array = centred / (values.std(ddof=1) + EPSILON)
    return standardised


def check_finite(totals: _Array) -> None:
    """Refuse rewards [N], penalties included, that are not finite or beyond `LARGEST_REWARD`."""
    bad = np.flatnonzero(~(np.abs(totals) <= LARGEST_REWARD))
    if bad.size:
        raise BurnishError(
            f"The reward of rollout {bad[0]} cannot be learned from.",
            have=f"{totals[bad[0]]} ({bad.size} of {totals.size} rollouts)",
            want=f"a finite number of at most {LARGEST_REWARD:g}",
            do="look at the reward function and, with KL in the reward, at the log-probs",
        )
