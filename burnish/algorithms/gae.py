"""From a critic's values to advantages and returns: generalized advantage estimation.

Computed on the host in fp64 over all rollouts of a step, because whitening needs the whole batch.
Left out: values of states behind a completion that was cut at its limit; its end counts as an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from burnish.algorithms.advantages import check_finite, standardised
from burnish.records import Floats
from burnish.tracking.stats import Mean, Stats


@dataclass(frozen=True, slots=True)
class Estimates:
    """What a critic's values come to: per rollout one fp32 array of the completion's length each."""

    advantages: list[Floats]
    """Whitened over all tokens of the step."""
    returns: list[Floats]
    """What the critic is to learn: the advantage before whitening plus the value."""


def gae(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    values: Sequence[Floats],
    token_penalties: Sequence[Floats] | None,
    gamma: float,
    lam: float,
) -> Estimates:
    """Generalized advantage estimation (arXiv 1506.02438, equations 11, 12 and 16) over the tokens of each completion.

        δ_t = r_t + γ V(s_{t+1}) - V(s_t)
        Â_t = Σ_{l ≥ 0} (γλ)^l δ_{t+l},    R_t = Â_t + V(s_t)

    `values[i][t]` is V(s_t), of the state in which token t was chosen; behind the last token V is 0.
    The reward `rewards[i]` comes with the last token, and each token pays its entry of
    `token_penalties` (KL in the reward, coefficient included). Tokens between those that the
    policy chose have no entry: s_{t+1} is the state of its next choice. Advantages are then
    whitened over all tokens. Raises `BurnishError` for a reward that is not finite.
    """
    scores = np.asarray(rewards, dtype=np.float64)
    exact = [np.asarray(each, dtype=np.float64) for each in values]
    lengths = [len(each) for each in exact]
    penalties = token_penalties or [np.zeros(length, dtype=np.float32) for length in lengths]
    paid = [np.asarray(each, dtype=np.float64) for each in penalties]
    check_finite(scores - np.array([each.sum() for each in paid], dtype=np.float64))
    deltas = np.zeros((max(lengths, default=0), len(lengths)))  # from each rollout's last token
    for i, (value, penalty) in enumerate(zip(exact, paid, strict=True)):
        delta = gamma * np.append(value[1:], 0.0)[: len(value)] - value - penalty
        delta[-1:] += scores[i]
        deltas[: lengths[i], i] = delta[::-1]
    running = np.zeros(len(lengths))
    for row in deltas:
        row += gamma * lam * running
        running = row
    sums = [deltas[:length, i][::-1] for i, length in enumerate(lengths)]
    returns = [(a + v).astype(np.float32) for a, v in zip(sums, exact, strict=True)]
    flat = standardised(np.concatenate([np.zeros(0), *sums])).astype(np.float32)
    return Estimates(np.split(flat, np.cumsum(lengths)[:-1]) if lengths else [], returns)


def value_stats(values: Sequence[Floats], returns: Sequence[Floats]) -> Stats:
    """How good the values were before the update, over all completion tokens of the step.

    - `values/mean`, `returns/mean`
    - `explained_var`: 1 - Var(R - V) / Var(R); 1 is perfect, 0 no better than a constant, NaN where all returns are equal
    """
    v, r = (np.concatenate([np.zeros(0), *each]) for each in (values, returns))
    if not len(v):
        return Stats()
    variance = float(r.var())
    return Stats(
        {
            "values/mean": Mean(float(v.sum()), len(v)),
            "returns/mean": Mean(float(r.sum()), len(r)),
            "explained_var": Mean(variance - float((r - v).var()), variance),
        }
    )
