"""What a validation measures, of rollouts that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.runs.collectors import Collected

from burnish.config.schema import RunConfig
from burnish.methods.parts.validation import prompt_validation
from burnish.records import Completion, Prompt, Rollout, StopReason
from burnish.records.rollout_table import RolloutTable

NOTHING = Completion(
    np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32), "stop", 0
)


def measured(
    parts: list[list[dict[str, float]]], sources: Sequence[str] = (), **evaluation: Any
) -> dict[str, float]:
    """The validation of prompts whose completions got these parts of their rewards."""
    groups = [
        [
            Rollout(prompt(i, source), s, NOTHING, "", sum(each.values()), each)
            for s, each in enumerate(group)
        ]
        for i, (group, source) in enumerate(
            zip(parts, sources or [""] * len(parts), strict=True),
        )
    ]
    return validated(groups, **evaluation)[0]


def prompt(index: int, source: str) -> Prompt:
    return Prompt(index, np.zeros(1, np.int64), "", None, None, source, {})


def validated(
    groups: list[list[Rollout]], **evaluation: Any
) -> tuple[dict[str, float], RolloutTable | None]:
    functions = [{"function": "rewards.py:correct"}, {"function": "rewards.py:style"}]
    settings = {"reward": {"functions": functions}, "evaluation": evaluation}
    prompts = [group[0].prompt for group in groups]
    collector = Collected(groups=RolloutTable.of(groups))
    foundation = SimpleNamespace(config=RunConfig.model_validate(settings))
    return prompt_validation(foundation, collector, prompts)()


def test_a_score_is_the_first_functions_where_that_applies() -> None:
    found = measured([[{"correct": 0.5, "style": 9}], [{"style": 9}]], n=1)
    assert found == {
        "val/mean@1": 0.5,
        "val/reward": (9.5 + 9) / 2,
        "val/dropped": 0,
        "val/reward_parts/correct": 0.5,
        "val/reward_parts/style": 9,
        "val/response_length/mean": 0,
        "val/response_length/clip_ratio": 0,
    }


@pytest.mark.parametrize(("solved", "passed"), [(1.0, 0.5), (0.5, 1.0), (2.0, 0.0)])
def test_what_counts_as_solved_is_a_setting(solved: float, passed: float) -> None:
    parts = [[{"correct": 0.5}, {"correct": 0.0}], [{"correct": 1.0}, {"correct": 0.0}]]
    assert measured(parts, n=2, solved=solved)["val/pass@2"] == passed
    assert measured(parts, n=2)["val/pass@2"] == 0.5


def test_each_source_is_measured_as_if_it_were_alone() -> None:
    parts = [[{"correct": 0.5}, {"correct": 1.0}], [{"correct": 0.0}] * 2, [{"correct": 1.0}] * 2]
    sources = ["openai/gsm8k", "math", "math"]
    found = measured(parts, sources, n=2)
    whole = measured(parts, n=2)
    alone = {"openai/gsm8k": measured(parts[:1], n=2), "math": measured(parts[1:], n=2)}
    theirs = {
        f"val/{source}/{name.removeprefix('val/')}": value
        for source, numbers in alone.items()
        for name, value in numbers.items()
    }
    assert found == whole | theirs
    assert (found["val/openai/gsm8k/mean@2"], found["val/math/mean@2"]) == (0.75, 0.5)


def test_prompts_without_a_source_count_in_the_whole_alone() -> None:
    found = measured([[{"correct": 1.0}], [{"correct": 0.0}]], ["math", ""], n=1)
    assert (found["val/mean@1"], found["val/math/mean@1"]) == (0.5, 1.0)
    assert not any(name.startswith("val//") for name in found)
    assert "val/reward_parts/correct" not in found  # it is the reward


def test_lengths_are_measured_and_the_rollouts_handed_on() -> None:
    def said(length: int, stop: StopReason) -> Rollout:
        ids, floats = np.zeros(length, np.int64), np.zeros(length, np.float32)
        return Rollout(prompt(0, ""), 0, Completion(ids, floats, floats, stop, 0), "")

    groups = [[said(2, "stop"), said(8, "length")], [said(8, "length"), said(8, "stop")]]
    found, kept = validated(groups, n=2)
    assert found["val/response_length/mean"] == 6.5
    assert found["val/response_length/clip_ratio"] == 0.5
    assert kept.objects == [rollout for group in groups for rollout in group]
