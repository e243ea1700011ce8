"""DAPO's dynamic sampling and overlong shaping (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.schema import DynamicSamplingConfig, OverlongConfig


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of a step's groups to train on."""

    keep: tuple[int, ...]
    """Indices of the groups to train on, in the order they came. Empty when no group has variance."""
    refill: int
    """How many further prompts to generate for before training; 0: train on `keep` as it is."""


def has_variance(rewards: Sequence[float]) -> bool:
    """Return whether a group's rewards differ (0 < correct < G in DAPO, equation 8)."""
    return len(set(rewards)) > 1


def select_groups(
    groups: Sequence[Sequence[float]], wanted: int, refills: int, config: DynamicSamplingConfig
) -> Selection:
    """Keep the first `wanted` groups; with dynamic sampling, the first that have variance.

    `groups` are the rewards so far, `refills` the rounds of further generation. After `max_refills`
    rounds the step has the groups there are, perhaps none.
    """
    if not config.enabled:
        return Selection(tuple(range(len(groups)))[:wanted], 0)
    keep = tuple(i for i, rewards in enumerate(groups) if has_variance(rewards))[:wanted]
    refill = wanted - len(keep) if refills < config.max_refills else 0
    return Selection(keep, refill)


def overlong_penalty(length: int, max_response_length: int, config: OverlongConfig) -> float:
    """Return DAPO's soft overlong punishment, to be *added* to a reward (equation 13).

    With L = `max_response_length` and B = `config.buffer`, `length` tokens give (L - B - length) / B
    within [-1, 0], times `config.penalty`; 0 without a buffer.
    """
    if config.buffer == 0:
        return 0.0
    over = min(length - (max_response_length - config.buffer), config.buffer)
    return -config.penalty * over / config.buffer if over > 0 else 0.0
