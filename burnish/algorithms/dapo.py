"""DAPO's dynamic sampling and overlong shaping (arXiv 2503.14476)."""

from __future__ import annotations

import numpy as np

from burnish.config.algorithm import DynamicSamplingConfig, OverlongConfig
from burnish.records.rollout_table import Column


def has_variance(rewards: Column, groups: Column, count: int) -> Column:
    """Return [`count`] whether each group's rewards differ (0 < correct < G in DAPO, equation 8).

    `groups` [N] ascend.
    """
    varied = np.zeros(count, np.bool_)
    varied[groups[1:][(rewards[1:] != rewards[:-1]) & (groups[1:] == groups[:-1])]] = True
    return varied


def select_groups(
    varied: Column, wanted: int, refills: int, config: DynamicSamplingConfig
) -> tuple[Column, int]:
    """Return the groups to train on, and how many prompts to generate for before.

    The groups are the first `wanted`; with dynamic sampling, the first that have variance. `refills` are
    the rounds of further generation so far. After `max_refills` rounds the step has the groups there are, perhaps none.
    """
    if not config.enabled:
        return np.arange(min(wanted, len(varied))), 0
    keep = np.flatnonzero(varied)[:wanted]
    return keep, wanted - len(keep) if refills < config.max_refills else 0


def overlong_penalty(lengths: Column, max_response_length: int, config: OverlongConfig) -> Column:
    """Return DAPO's soft overlong punishment, to be *added* to a reward (equation 13).

    With L = `max_response_length` and B = `config.buffer`, `lengths` [N] give (L - B - length) / B
    within [-1, 0], times `config.penalty`; 0 without a buffer.
    """
    over = np.clip(lengths - (max_response_length - config.buffer), 0, config.buffer)
    return -config.penalty * over / max(config.buffer, 1)
