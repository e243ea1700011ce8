"""Statistics of rollouts, and warnings of failing reward functions."""

from __future__ import annotations

import logging

import numpy as np

from burnish.errors import BurnishError, count_text
from burnish.records import Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.tracking.stats import Max, Mean, Stats, Sum

log = logging.getLogger("burnish")


class RewardFailures:
    """Warn once of each kind of failure, and end a run without rewards."""

    def __init__(self, most_rounds: int) -> None:
        self._heard: set[str] = set()
        self._most_rounds = most_rounds
        self._lost_in_a_row = 0
        self._is_answered = False
        self._last: Rollout | None = None

    def update(self, table: RolloutTable) -> None:
        """Warn of new kinds of failures in this round.

        Raises `BurnishError` if all rollouts failed in `most_rounds` rounds in a row, or with one kind of error in the first.
        """
        failed, count = [table.rollout(number) for number in table.failed], len(table.owners)
        kinds: dict[str, str] = {}
        for rollout in failed:
            error = str(rollout.reward_error)
            kinds.setdefault(":".join(error.split(":", 2)[:2]), error)
        for kind in [kind for kind in kinds if kind not in self._heard]:
            self._heard.add(kind)
            log.warning(
                "reward functions failed for %d of %d completions, which count as reward.on_error: %s",
                len(failed),
                count,
                kinds[kind],
            )
        is_first = self._last is None and not self._is_answered
        if len(failed) < count:
            self._lost_in_a_row, self._is_answered = 0, True
        elif failed:
            self._lost_in_a_row, self._last = self._lost_in_a_row + 1, failed[-1]
            if is_first and len(kinds) == 1:
                raise _no_rewards(failed[-1], "of the first round")
            if self._lost_in_a_row >= self._most_rounds:
                lost = count_text(self._lost_in_a_row, "round")
                raise _no_rewards(failed[-1], f"of {lost} in a row")

    def require_answer(self) -> None:
        """Raise `BurnishError` if every completion of the run failed."""
        if self._last is not None and not self._is_answered:
            raise _no_rewards(self._last, "of the run")


def _no_rewards(rollout: Rollout, when: str) -> BurnishError:
    return BurnishError(
        f"reward functions failed for every completion {when}",
        have=rollout.reward_error,
        want="an answer for some completions at least",
        do=f"mend the function{message_hint(rollout)}; then start the run again, which goes on from its latest "
        "checkpoint. reward.max_failed_rounds sets how many such rounds are tolerated after the first",
    )


def message_hint(rollout: Rollout) -> str:
    """Return a hint, if an error is about a list of messages."""
    if rollout.prompt.messages is None or "list" not in str(rollout.reward_error):
        return ""
    return (
        ": completions are lists of messages here, because prompts are conversations. "
        'The text of one is completion[-1]["content"]'
    )


def rollout_stats(table: RolloutTable) -> Stats:
    """Return `reward/...` and `response_length/...` of scored rollouts.

    `reward/std` is the mean over groups of the (population) standard deviation.
    """
    count = len(table.owners)
    if not count:
        return Stats()
    rewards, lengths, sizes = table.rewards, table.lengths, table.sizes
    starts, cut = sizes.cumsum() - sizes, table.count(lambda kind: kind.stop_reason == "length")
    means = np.add.reduceat(rewards, starts) / sizes
    squares = np.add.reduceat(np.square(rewards - means[table.groups]), starts)
    flat = np.minimum.reduceat(rewards, starts) == np.maximum.reduceat(rewards, starts)
    stats = Stats(
        {
            "reward/mean": Mean(float(rewards.sum()), count),
            "reward/std": Mean(float(np.sqrt(squares / sizes).sum()), len(table)),
            "reward/zero_std_frac": Mean(int(flat.sum()), len(table)),
            "reward/errors": Sum(table.count(lambda kind: kind.error is not None)),
            "response_length/mean": Mean(int(lengths.sum()), count),
            "response_length/max": Max(int(lengths.max())),
            "response_length/clip_ratio": Mean(cut, count),
        }
    )
    for name in dict.fromkeys(name for kind in table.kinds for name in kind.parts):
        values, there = table.part(name)
        if there.any():
            stats[f"reward/parts/{name}"] = Mean(float(values.sum()), int(there.sum()))
    return stats
