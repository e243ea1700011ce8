from __future__ import annotations

import pytest

from burnish.config.load import load_config
from burnish.config.notices import notices

GSPO = "algorithm.policy_loss=gspo"
PAPER = [
    "algorithm.aggregation=sequence_mean",
    "algorithm.clip_low=3e-4",
    "algorithm.clip_high=4e-4",
]


def said(*overrides: str) -> list[str]:
    return list(notices(load_config(None, overrides).config, "rl"))


def test_nothing_is_said_of_what_is_as_usual() -> None:
    assert said() == []
    assert said("algorithm.aggregation=sequence_sum_fixed") == []
    assert said(GSPO, *PAPER) == []


def test_held_out_data_that_are_hardly_looked_at() -> None:
    data = "data.validation=[x.jsonl]"
    (line,) = said(data)
    assert "before the first step only" in line
    (line,) = said(data, "evaluation.before=false")
    assert "never" in line
    assert said(data, "evaluation.every=5") == []
    assert list(notices(load_config(None, [data]).config, "eval")) == []


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_sum_fixed"])
def test_gspo_with_another_aggregation_than_its_own(aggregation: str) -> None:
    (line,) = said(GSPO, *PAPER, f"algorithm.aggregation={aggregation}")
    assert f"sequence_mean; here it is {aggregation}" in line


def test_gspo_with_the_clip_range_of_ppo() -> None:
    (line,) = said(GSPO, "algorithm.aggregation=sequence_mean")
    assert "clip_low 0.2 and clip_high 0.2 clips next to nothing" in line
    assert "\n" not in line


def test_other_commands_have_no_policy_loss() -> None:
    assert list(notices(load_config(None, [GSPO]).config, "sft")) == []
