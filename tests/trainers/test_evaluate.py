"""What a validation measures, of rollouts that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from burnish.config.schema import RunConfig
from burnish.records import Completion, Prompt, Rollout
from burnish.trainers.evaluate import prompt_validation

NOTHING = Completion(
    np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32), "stop", 0
)


def measured(parts: list[list[dict[str, float]]], **evaluation: Any) -> dict[str, float]:
    """The validation of prompts whose completions got these parts of their rewards."""
    functions = [{"function": "rewards.py:correct"}, {"function": "rewards.py:style"}]
    settings = {"reward": {"functions": functions}, "evaluation": evaluation}
    prompts = [Prompt(i, np.zeros(1, np.int64), "", None, None, "", {}) for i in range(len(parts))]
    groups = [
        [Rollout(prompt, s, NOTHING, "", sum(each.values()), each) for s, each in enumerate(group)]
        for prompt, group in zip(prompts, parts, strict=True)
    ]
    collector = SimpleNamespace(collect=lambda *_: groups)
    foundation = SimpleNamespace(config=RunConfig.model_validate(settings))
    return prompt_validation(foundation, collector, prompts)()


def test_a_score_is_the_first_functions_also_where_that_did_not_apply() -> None:
    found = measured([[{"correct": 0.5, "style": 9}], [{"style": 9}]], n=1)
    assert found == {"val/mean@1": 0.25, "val/reward": (9.5 + 9) / 2}


@pytest.mark.parametrize(("solved", "passed"), [(1.0, 0.5), (0.5, 1.0), (2.0, 0.0)])
def test_what_counts_as_solved_is_a_setting(solved: float, passed: float) -> None:
    parts = [[{"correct": 0.5}, {"correct": 0.0}], [{"correct": 1.0}, {"correct": 0.0}]]
    assert measured(parts, n=2, solved=solved)["val/pass@2"] == passed
    assert measured(parts, n=2)["val/pass@2"] == 0.5
