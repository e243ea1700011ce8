"""What the generator keeps of what it has read: keys and values, while all its slots are at their longest."""

from __future__ import annotations

from burnish.plan.model import Model
from burnish.plan.workload import Workload

_FP32 = 4
_GRAIN = 128
"""Rows that become longer than this grow, one tensor after the other, and each is there twice then."""


def cache_bytes(model: Model, work: Workload, slots: int, sequences: int) -> float:
    """Of a process that generates so many sequences, so many of them at one time.

    Each has its prompt beside it, or, in fp32 on CPUs without matrix units, shares it (`burnish.rollout.builtin.kv_cache`).
    """
    token, grown = model.cache_per_token, 1 + 1 / (2 * model.shape.depth)
    if not model.exact_cache:
        return slots * work.length * token * grown
    # Sequences start in the order of their prompts.
    prompts = min(-(-sequences // work.samples), -(-(slots - 1) // work.samples) + 1, slots)
    own = slots * work.trained * (grown if work.trained > _GRAIN else 1.0)
    return (own + prompts * work.prompt) * token * _FP32 / model.bytes
