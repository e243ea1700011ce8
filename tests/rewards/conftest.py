"""Rollouts to score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from burnish.records import Completion, Prompt, Rollout


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return _make_rollout


def _make_rollout(
    text: str = "4",
    answer: Any = "4",
    *,
    index: int = 0,
    sample: int = 0,
    messages: list[dict[str, Any]] | None = None,
    columns: dict[str, Any] | None = None,
    length: int = 3,
    stop_reason: Literal["stop", "length"] = "stop",
    reward: float = 0.0,
) -> Rollout:
    prompt = Prompt(
        index=index,
        token_ids=np.arange(2),
        text="2+2=",
        messages=messages,
        answer=answer,
        source="sums",
        columns={"answer": answer} if columns is None else columns,
    )
    completion = Completion(
        token_ids=np.arange(length),
        sampled_logprobs=np.zeros(length, np.float32),
        logprobs=np.zeros(length, np.float32),
        stop_reason=stop_reason,
        weights_version=0,
    )
    return Rollout(prompt, sample, completion, text, reward=reward)
