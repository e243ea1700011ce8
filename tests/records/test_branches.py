"""A conversation of several sequences counts once, and each of its sequences has its reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.runs.rollouts import made_rollout

from burnish.config.schema import RewardConfig
from burnish.methods.parts.rollouts import compared_rewards, rewarded
from burnish.records.rollout_table import RolloutTable
from burnish.rewards.overview import LostRewards, require_rewards, rollout_stats
from burnish.tracking.rollouts import EXTREMES, RANDOMS, chosen

BRANCHES = ((0, 1, 2), (0,), (0, 1))
"""Of three conversations with a prompt."""


def groups(with_branches=True):
    """Two groups; the rewards of branches are other ones, which must not count."""
    return [
        [
            replace(
                made_rollout(index, sample, reward=index + sample + 10.0 * branch), branch=branch
            )
            for sample, branches in enumerate(BRANCHES)
            for branch in branches
            if with_branches or branch == 0
        ]
        for index in range(2)
    ]


def test_statistics_count_a_conversation_once():
    whole = RolloutTable.of(groups())
    alone = RolloutTable.of(groups(with_branches=False))
    without = whole.without_branches()
    # The length of a conversation is that of all its branches.
    assert without.lengths.tolist() == [9, 3, 6] * 2
    drawn = {**without.rows, "drawn": alone.rows["drawn"]}
    assert replace(without, rows=drawn).encoded() == alone.encoded()
    lengths = {f"response_length/{name}" for name in ("mean", "max")}
    stats = [rollout_stats(table) for table in (whole, alone)]
    assert {name for name in stats[0] if stats[0][name] != stats[1][name]} == lengths
    assert stats[0]["response_length/mean"].total == 2 * stats[1]["response_length/mean"].total
    compared = [compared_rewards(table, "exact", ()) for table in (whole, alone)]
    for mine, theirs in zip(*compared, strict=True):
        assert mine.tolist() == theirs.tolist()
    one, other = (rollout_stats(table.take([1])) for table in (whole, alone))
    assert one["reward/mean"] == other["reward/mean"]


def test_a_branch_belongs_to_the_rollout_before_it():
    table = RolloutTable.of(groups())
    assert table.firsts.tolist() == [0, 0, 0, 3, 4, 4, 6, 6, 6, 9, 10, 10]
    gathered = RolloutTable.gathered([table.encoded()])
    assert [each.branch for each in gathered.rollouts] == [0, 1, 2, 0, 0, 1] * 2
    assert len(RolloutTable.of([]).firsts) == 0
    assert [table.branches(number) for number in (0, 3, 10)] == [[2, 1, 0], [3], [11, 10]]
    assert table.summed(np.arange(12))[:6].tolist() == [3, 3, 3, 3, 9, 9]


def test_a_conversation_that_failed_counts_once():
    (group, _) = groups()
    failed = [
        replace(each, reward=np.nan, reward_error="environment: lost") if each.sample == 0 else each
        for each in group
    ]
    table = RolloutTable.of([failed])  # 3 of 6 rollouts, and 1 of 3 conversations
    require_rewards(table, RewardConfig(max_failed_share=0.4))
    with pytest.raises(LostRewards):
        require_rewards(table, RewardConfig(max_failed_share=0.3))


def test_the_rollouts_that_are_kept_longest_are_whole_conversations():
    many = [
        replace(made_rollout(0, sample, reward=float(sample)), branch=branch)
        for sample in range(20)
        for branch in range(3)
    ]
    kept = chosen(1, RolloutTable.of([many]))
    assert {*range(12), *range(48, 60)} < kept
    assert len(kept) == 3 * (2 * EXTREMES + RANDOMS)


def test_branches_are_not_scored_and_have_the_reward_of_their_conversation():
    (group, _) = groups()
    scores = np.array([0.5, np.nan, 2.0])
    scored = iter(
        replace(each, reward=score, reward_error="lost" if np.isnan(score) else None)
        for each, score in zip(
            (each for each in group if each.branch == 0), scores.tolist(), strict=True
        )
    )
    rewards = [each.reward for each in rewarded(group, scored)]
    np.testing.assert_array_equal(rewards, scores[[0, 0, 0, 1, 2, 2]])
