"""For runs with an advantage function of the user: one that reads the KL penalty of every token of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burnish.algorithms.base import Array, ScoredRollouts


def less_the_largest_penalty(rollouts: ScoredRollouts) -> Sequence[Array]:
    """r_i - KL_t - the largest KL of any token."""
    largest = np.concatenate(rollouts.penalties).max(initial=0.0)
    return [
        reward - penalty - largest
        for reward, penalty in zip(rollouts.rewards, rollouts.penalties, strict=True)
    ]
