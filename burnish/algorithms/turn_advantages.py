"""Advantages of a conversation's turns, which all tokens of a turn share.

The return of a turn is R_ik = Σ_{l ≥ k} γ^(l-k) r_il, with r_il the reward of turn l of rollout i. mean and std, with Bessel's
correction, are over turns of rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from burnish.algorithms.advantages import grpo
from burnish.algorithms.base import Array, ScoredRollouts
from burnish.config.algorithm import GiGPOSettings, TurnGRPOSettings


def turn_grpo(scored: ScoredRollouts, settings: TurnGRPOSettings) -> list[Array]:
    """A_ik = (R_ik - mean_k) / (std_k + ε), over the turns k of the group's rollouts that have one."""
    returns = _returns(scored, settings.gamma)
    places: list[Hashable] = [place for own in scored.turns for place in range(len(own))]
    return _on_tokens(scored, _compared(scored, returns, places))


def gigpo(scored: ScoredRollouts, settings: GiGPOSettings) -> list[Array]:
    """A_ik = (r_i - mean) / (std + ε) + ω (R_ik - mean_s) / (std_s + ε) (GiGPO, arXiv 2505.10978, equations 3, 7 and 8).

    mean_s and std_s are over the group's turns in the same state s, before which the environment said the same.
    """
    counts = [len(own) for own in scored.turns]
    returns = _returns(scored, settings.gamma)
    states: list[Hashable] = [turn.state for own in scored.turns for turn in own]
    of_turns = settings.weight * _compared(scored, returns, states)
    return _on_tokens(scored, np.repeat(grpo(scored), counts) + of_turns)


def _returns(scored: ScoredRollouts, gamma: float) -> Array:
    """Return the returns of all turns, rollout after rollout."""
    returns = list[float]()
    for own in scored.turns:
        total = 0.0
        of_rollout = list[float]()
        for turn in reversed(own):
            total = turn.reward + gamma * total
            of_rollout.append(total)
        returns += reversed(of_rollout)
    return np.array(returns, np.float64)


def _compared(scored: ScoredRollouts, returns: Array, alike: Sequence[Hashable]) -> Array:
    """Standardise returns over the turns of a group for which `alike` is equal."""
    groups = np.repeat(scored.groups, [len(own) for own in scored.turns]).tolist()
    numbers = dict[tuple[int, Hashable], int]()
    for key in zip(groups, alike, strict=True):
        numbers.setdefault(key, len(numbers))
    of_turns = np.array([numbers[key] for key in zip(groups, alike, strict=True)], np.int64)
    return grpo(ScoredRollouts(returns, of_turns, np.ones(len(returns), np.int64)))


def _on_tokens(scored: ScoredRollouts, values: Array) -> list[Array]:
    """Give each token of a rollout the value of its turn."""
    ends = np.cumsum([len(own) for own in scored.turns])[:-1]
    return [
        np.repeat(part, [turn.tokens for turn in own])
        for own, part in zip(scored.turns, np.split(values, ends), strict=True)
    ]
