from __future__ import annotations

import pytest

from burnish.config.keys import known_keys
from burnish.config.load import read_config
from burnish.methods.table import METHODS

GSPO = "algorithm.policy_loss=gspo"
PAPER = [
    "algorithm.aggregation=sequence_mean",
    "algorithm.clip_low=3e-4",
    "algorithm.clip_high=4e-4",
]


def said(*overrides: str) -> list[str]:
    return list(METHODS["rl"].notices(read_config(None, overrides)))


def test_nothing_is_said_of_what_is_as_usual() -> None:
    assert said() == []
    assert said("algorithm.aggregation=sequence_sum_fixed") == []
    assert said(GSPO, *PAPER) == []


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_sum_fixed"])
def test_gspo_with_another_aggregation_than_its_own(aggregation: str) -> None:
    (line,) = said(GSPO, *PAPER, f"algorithm.aggregation={aggregation}")
    assert "sequence_mean" in line
    assert aggregation in line


def test_gspo_with_the_clip_range_of_ppo() -> None:
    (line,) = said(GSPO, "algorithm.aggregation=sequence_mean")
    assert "clip_low 0.2 and clip_high 0.2" in line
    assert "\n" not in line


def test_cispo_with_a_lower_side_and_another_aggregation() -> None:
    cispo = "algorithm.policy_loss=cispo"
    (line,) = said(cispo)
    assert "clip_low 0.2 " in line
    assert " 0.8 " in line
    assert said(cispo, "algorithm.clip_low=1") == []
    (line,) = said(cispo, "algorithm.clip_low=1", "algorithm.aggregation=sequence_mean")
    assert "token_mean" in line
    assert "sequence_mean" in line


def test_what_a_command_does_not_use() -> None:
    reward = "reward.functions=[{function: numeric}]"
    shared = ["data.prompt_column=q", "batch.tokens_per_device=100", "optim.lr=1", "rollout.n=8"]
    given = [
        *shared,
        reward,
        "batch.prompts=4",
        "batch.examples=4",
        "evaluation.temperature=0",
        GSPO,
    ]
    config = read_config(None, given)
    (line,) = METHODS["sft"].notices(config)
    assert line.endswith(" sft: reward, algorithm, batch.prompts, evaluation.temperature")
    assert next(METHODS["rl"].notices(config)).endswith(" rl: batch.examples")
    assert list(METHODS["eval"].notices(config)) == []
    assert list(METHODS["sft"].notices(read_config(None, shared))) == []


def test_what_a_command_does_not_use_are_settings() -> None:
    assert [
        name for method in METHODS.values() for name in method.unread if name not in known_keys()
    ] == []


def test_drawing_ahead_without_a_correction() -> None:
    (line,) = said("rollout.ahead=2")
    assert "algorithm.mismatch_cap" in line
    for corrected in ("mismatch_cap=2", "mismatch_reject=token", "old_logprobs=rollout"):
        assert said("rollout.ahead=2", f"algorithm.{corrected}") == []
    assert list(METHODS["eval"].notices(read_config(None, ["rollout.ahead=2"]))) == []


def test_drawing_all_at_once() -> None:
    corrected = ["rollout.ahead=2", "algorithm.mismatch_cap=2"]
    assert said(*corrected, "steps=3") == []
    (line,) = said(*corrected, "steps=2")
    assert "rollout.ahead" in line
