"""For tests of what is written and shown: rollouts without a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burnish.records import Completion, Prompt, RewardCall, Rollout, StopReason
from burnish.records.rollout_table import RolloutTable


def made_rollout(
    index: int = 0,
    sample: int = 0,
    *,
    text: str = "4",
    reward: float = 1.0,
    prompt: str = "2+2=",
    error: str | None = None,
    stop: StopReason = "stop",
    calls: tuple[RewardCall, ...] = (),
) -> Rollout:
    """A rollout of three tokens."""
    tokens = np.arange(3)
    floats = np.zeros(3, dtype=np.float32)
    return Rollout(
        prompt=Prompt(index, tokens, prompt, None, 4, "sums", {}),
        sample=sample,
        completion=Completion(
            tokens, floats, floats, stop, weights_version=7, times=(100.0, 100.5, 102.0)
        ),
        text=text,
        reward=reward,
        reward_parts={"exact": reward},
        reward_error=error,
        calls=calls,
    )


def table_of(rollouts: Sequence[Rollout]) -> RolloutTable:
    """Each with a prompt of its own."""
    return RolloutTable.of([[each] for each in rollouts])
