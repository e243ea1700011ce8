"""A conversation of several sequences counts once, and each of its sequences has its reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.runs.rollouts import made_rollout

from burnish.methods.parts.rollouts import compared_rewards, rewarded
from burnish.records.rollout_table import RolloutTable
from burnish.rewards.overview import rollout_stats

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
    assert rollout_stats(whole) == rollout_stats(alone)
    assert whole.without_branches().encoded() == alone.encoded()
    compared = [compared_rewards(table, "exact", ()) for table in (whole, alone)]
    for mine, theirs in zip(*compared, strict=True):
        assert mine.tolist() == theirs.tolist()
    chosen = [table.take([1]) for table in (whole, alone)]
    assert rollout_stats(chosen[0]) == rollout_stats(chosen[1])


def test_a_branch_belongs_to_the_rollout_before_it():
    table = RolloutTable.of(groups())
    assert table.firsts.tolist() == [0, 0, 0, 3, 4, 4, 6, 6, 6, 9, 10, 10]
    gathered = RolloutTable.gathered([table.encoded()])
    assert [each.branch for each in gathered.rollouts] == [0, 1, 2, 0, 0, 1] * 2
    assert len(RolloutTable.of([]).firsts) == 0


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
