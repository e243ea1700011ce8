"""For tests of what is written and shown: rollouts without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.records import Completion, Prompt, RewardCall, Rollout, StopReason
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import End, TurnSpan

RECORD = (
    {"role": "user", "content": "Begin."},
    {"role": "assistant", "content": "<call>", "calls": [{"name": "multiply", "arguments": {"a": 3}}],
     "tokens": 5, "rewards": {"called": 0.25}},
    {"role": "tool", "name": "multiply", "content": "Error: no b", "is_error": True},
    {"role": "assistant", "content": "12", "calls": [], "tokens": 2, "rewards": {"right": 1.0}},
)  # fmt: skip
TURNS = (
    TurnSpan("environment", "environment", -1, 99.0, 0.5),
    TurnSpan("model", "model", 0, 100.0, 1.0),
    TurnSpan("environment", "environment", 0, 101.0, 0.5),
    TurnSpan("tool", "multiply", 0, 101.25, 0.125, "Error: no b"),
    TurnSpan("model", "model", 1, 102.0, 1.0),
    TurnSpan("environment", "environment", 1, 103.0, 0.25),
)


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


def made_talk(
    index: int = 0,
    sample: int = 0,
    *,
    record: Sequence[Mapping[str, Any]] = RECORD,
    end: End = "done",
    calls: tuple[RewardCall, ...] = (),
    **fields: Any,
) -> Rollout:
    """A conversation of two turns, whose first calls a tool. Of its three tokens the environment wrote the second."""
    made = made_rollout(index, sample, calls=(RewardCall("environment", 1.25, None, 100.0, 0.75), *calls), **fields)  # fmt: skip
    completion = replace(made.completion, response_mask=np.array([True, False, True]))
    numbers = {"turns": 2.0, "calls": 1.0, "luck": 0.5}
    return replace(made, completion=completion, metrics=numbers, conversation=tuple(record), spans=TURNS, end=end)  # fmt: skip


def table_of(rollouts: Sequence[Rollout]) -> RolloutTable:
    """Each with a prompt of its own."""
    return RolloutTable.of([[each] for each in rollouts])
