from __future__ import annotations

import logging
from dataclasses import replace
from math import isnan, nan

import pytest

from burnish.config.schema import RewardConfig
from burnish.records.rollout_table import RolloutTable
from burnish.rewards.overview import LostRewards, RewardFailures, require_rewards, rollout_stats


def test_statistics_of_a_step(make_rollout) -> None:
    rollouts = [
        make_rollout(index=7, reward=1.0, length=2),
        make_rollout(index=7, sample=1, reward=0.0, length=8, stop_reason="length"),
        make_rollout(index=3, reward=1.0, length=0),
        make_rollout(index=3, sample=1, reward=1.0, length=2),
    ]
    rollouts[0] = replace(rollouts[0], reward_parts={"numeric": 1.0}, reward_error="numeric: slow")
    rollouts[2] = replace(rollouts[2], reward_parts={"numeric": 0.5, "judge": 3.0})
    want = {
        "reward/mean": 0.75,
        "reward/std": 0.25,
        "reward/zero_std_frac": 0.5,
        "reward/errors": 1,
        "reward/dropped": 0,
        "response_length/mean": 3,
        "response_length/max": 8,
        "response_length/clip_ratio": 0.25,
        "reward/parts/numeric": 0.75,
        "reward/parts/judge": 3,
    }
    groups = [rollouts[:2], rollouts[2:]]
    assert rollout_stats(RolloutTable.of(groups)).values_by_name() == pytest.approx(want)
    one, other = (rollout_stats(RolloutTable.of([group])) for group in groups)
    merged = one.merge(other)
    assert merged.values_by_name() == pytest.approx(want)


def test_a_prompt_met_twice_has_two_groups(make_rollout) -> None:
    groups = [[make_rollout(sample=s, reward=r) for s in (0, 1)] for r in (0.0, 1.0)]
    values = rollout_stats(RolloutTable.of(groups)).values_by_name()
    assert values["reward/zero_std_frac"] == 1
    assert values["reward/std"] == 0


def test_ends_of_conversations_are_counted(make_rollout) -> None:
    rollouts = [make_rollout(sample=n) for n in range(4)]
    ends = ["done", "failed", "turns", "done"]
    talks = [replace(each, end=end) for each, end in zip(rollouts, ends, strict=True)]
    values = rollout_stats(RolloutTable.of([talks])).values_by_name()
    found = {name: value for name, value in values.items() if name.startswith("environment/")}
    shares = {"done": 0.5, "failed": 0.25, "turns": 0.25, "length": 0, "calls": 0, "unreadable": 0}
    want = {f"environment/ended_{end}": share for end, share in shares.items()}
    assert found == want | {"environment/failed": 1}
    assert not any("environment" in name for name in rollout_stats(round_of(*rollouts)))


def test_of_nothing() -> None:
    assert rollout_stats(RolloutTable.of([])) == {}


def round_of(*rollouts) -> RolloutTable:
    return RolloutTable.of([[each] for each in rollouts])


def test_each_kind_of_failure_is_said_once(make_rollout, caplog) -> None:
    fine, broken = make_rollout(), make_rollout(sample=1)
    broken = replace(broken, reward_error="judge: ValueError: out for lunch (judge.py:3)")
    again = replace(broken, reward_error="judge: ValueError: out for dinner (judge.py:3)")
    other = replace(broken, reward_error="judge: returned nan")
    failures = RewardFailures(RewardConfig())
    with caplog.at_level(logging.WARNING, "burnish"):
        failures.update(round_of(fine, fine))
        failures.update(round_of(fine, broken, again))
        failures.update(round_of(again, other))
    first, second = (record.getMessage() for record in caplog.records)
    assert "2 of 3 completions" in first
    assert "out for lunch (judge.py:3)" in first
    assert "2 of 2 completions" in second
    assert "returned nan" in second


def test_dropped_rollouts_are_in_no_statistic_of_rewards(make_rollout) -> None:
    rewards = [[1.0, nan, 0.0], [nan, nan, nan], [nan, 1.0, nan]]
    every = [[make_rollout(index=i, reward=r) for r in row] for i, row in enumerate(rewards)]
    found = rollout_stats(RolloutTable.of(every)).values_by_name()
    left = [[each for each in group if not isnan(each.reward)] for group in every]
    want = rollout_stats(RolloutTable.of([group for group in left if group])).values_by_name()
    assert found == want | {"reward/dropped": 6}
    nothing = rollout_stats(RolloutTable.of([every[1]])).values_by_name()
    assert isnan(nothing["reward/mean"])
    assert nothing["reward/dropped"] == 3


def test_a_step_that_loses_more_than_a_share_of_its_rewards_ends_the_run(make_rollout) -> None:
    chat = make_rollout(messages=[{"role": "user", "content": "2+2="}])
    error = "mine: AttributeError: 'list' object has no attribute 'strip' (rewards.py:2)"
    broken = replace(chat, reward=nan, reward_error=error)
    step = round_of(chat, broken, broken, replace(broken, reward_error="mine: slow"))
    for share in (0.75, 1.0):
        require_rewards(step, RewardConfig(max_failed_share=share))
    with pytest.raises(LostRewards) as caught:
        require_rewards(step, RewardConfig(max_failed_share=0.74))
    assert caught.value.exit_code == 2
    assert "3 of 4" in caught.value.problem
    assert caught.value.have == f"{error} (2 times)"
    assert 'completion[-1]["content"]' in str(caught.value.do)
    require_rewards(RolloutTable.of([]), RewardConfig())


def test_failures_that_count_as_a_number_end_the_run_if_nothing_else_is_left(make_rollout) -> None:
    broken, config = replace(make_rollout(), reward_error="mine: slow"), RewardConfig(on_error=0.0)
    require_rewards(round_of(make_rollout(), broken, broken, broken), config)
    with pytest.raises(LostRewards):
        require_rewards(round_of(broken, broken), config)


def test_dropped_conversations_end_the_run_even_if_other_failures_count(make_rollout) -> None:
    lost = replace(make_rollout(), reward=nan, reward_error="environment: no connection")
    config = RewardConfig(on_error=0.0)
    require_rewards(round_of(make_rollout(), lost), config)
    with pytest.raises(LostRewards) as caught:
        require_rewards(round_of(make_rollout(), lost, lost), config)
    assert "no connection" in str(caught.value.have)


def test_a_run_without_a_single_answer_ends_with_an_error(make_rollout) -> None:
    one, other = (replace(make_rollout(), reward_error=f"mine: {each}") for each in ("a:", "b:"))
    failures = RewardFailures(RewardConfig())
    failures.require_answer()
    failures.update(round_of(one, other))
    with pytest.raises(LostRewards):
        failures.require_answer()
    failures.update(round_of(make_rollout()))
    failures.require_answer()
