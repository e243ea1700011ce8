"""Statistics of rollouts, and warnings of failing reward functions."""

from __future__ import annotations

import logging
from typing import get_args

import numpy as np

from burnish.config.schema import RewardConfig
from burnish.errors import UsageError, count_text
from burnish.records import Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import End
from burnish.tracking.stats import Max, Mean, Stats, Sum

log = logging.getLogger("burnish")


class LostRewards(UsageError):
    """Too many rollouts of a step have no reward; all ranks raise it. The run stops after a save."""

    printed_by_main = True


class RewardFailures:
    """Warn once of each kind of failure, and end a run that loses too many rewards."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._warned: set[str] = set()
        self._is_answered = False
        self._last: RolloutTable | None = None

    def update(self, table: RolloutTable) -> None:
        """Warn of new kinds of failures among rollouts that are scored together."""
        table = table.without_branches()
        # An error reads "FUNCTION: TYPE: text", and the text may differ for every completion.
        kinds: dict[str, str] = {}
        for error in _errors(table):
            kinds.setdefault(":".join(error.split(":", 2)[:2]), error)
        for kind in [kind for kind in kinds if kind not in self._warned]:
            self._warned.add(kind)
            of_environment = kind.startswith("environment:")
            dropped = of_environment or self._config.on_error == "drop"
            log.warning(
                "%s failed for %d of %d completions, which %s: %s",
                "environments" if of_environment else "reward functions",
                len(table.failed),
                len(table.owners),
                "are dropped" if dropped else f"count as {self._config.on_error:g}",
                kinds[kind],
            )
        if len(table.failed) < len(table.owners):
            self._is_answered = True
        elif len(table.owners):
            self._last = table

    def require_answer(self) -> None:
        """Raise `UsageError` if every completion of the run failed."""
        if self._last is not None and not self._is_answered:
            raise _lost_rewards(self._last, "of the run", "an answer for some completions at least")


def require_rewards(table: RolloutTable, config: RewardConfig) -> None:
    """Raise `LostRewards` if a step, `table`, dropped more than `reward.max_failed_share`, or if all its rewards failed and count as a number."""
    table = table.without_branches()
    failed = len(table.failed)
    count = len(table.owners)
    share = config.max_failed_share
    setting = "reward.max_failed_share"
    most = count * share if config.on_error == "drop" else count - 1
    dropped = count - int(table.is_scored.sum())
    if failed > most or dropped > count * share:
        raise _lost_rewards(table, "of a step", f"at most {100 * share:g} % ({setting})")


def _errors(table: RolloutTable) -> list[str]:
    return [str(table.kinds[number].error) for number in table.rows["kind"][table.failed].tolist()]


def _lost_rewards(table: RolloutTable, of: str, want: str) -> LostRewards:
    failed = len(table.failed)
    count = len(table.owners)
    errors = _errors(table)
    first = table.rollout(table.failed[0])
    return LostRewards(
        f"rewards failed for {failed} of {count_text(count, 'completion')} {of}",
        have=f"{errors[0]} ({errors.count(errors[0])} times)",
        want=want,
        do=f"mend what failed{message_hint(first)}; then start the run again, which goes on from its latest checkpoint",
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

    `reward/std` is the mean over groups of the (population) standard deviation. Rollouts that are dropped have no reward.
    """
    table = table.without_branches()
    count = len(table.owners)
    if not count:
        return Stats()
    scored = table.is_scored
    lengths = table.lengths
    rewards = table.rewards[scored]
    _, starts, of_groups, sizes = np.unique(
        table.groups[scored], return_index=True, return_inverse=True, return_counts=True
    )
    cut = table.count(lambda kind: kind.stop_reason == "length")
    spread = 0.0
    flat = 0
    if len(rewards):
        means = np.add.reduceat(rewards, starts) / sizes
        squares = np.add.reduceat(np.square(rewards - means[of_groups]), starts)
        spread = float(np.sqrt(squares / sizes).sum())
        least = np.minimum.reduceat(rewards, starts)
        most = np.maximum.reduceat(rewards, starts)
        flat = int((least == most).sum())
    stats = Stats(
        {
            "reward/mean": Mean(float(rewards.sum()), len(rewards)),
            "reward/std": Mean(spread, len(sizes)),
            "reward/zero_std_frac": Mean(flat, len(sizes)),
            "reward/errors": Sum(table.count(lambda kind: kind.error is not None)),
            "reward/dropped": Sum(count - len(rewards)),
            "response_length/mean": Mean(int(lengths.sum()), count),
            "response_length/max": Max(int(lengths.max())),
            "response_length/clip_ratio": Mean(cut, count),
        }
    )
    for name in dict.fromkeys(name for kind in table.kinds for name in kind.parts):
        values, there = table.part(name)
        if there.any():
            stats[f"reward/parts/{name}"] = Mean(float(values.sum()), int(there.sum()))
    for name in dict.fromkeys(name for kind in table.kinds for name in kind.metrics):
        values, there = table.metric(name)
        if there.any():
            stats[f"environment/{name}"] = Mean(float(values.sum()), int(there.sum()))
    if any(kind.end for kind in table.kinds):
        ends = [table.kinds[number].end for number in table.rows["kind"].tolist()]
        for end in get_args(End):
            stats[f"environment/ended_{end}"] = Mean(ends.count(end), count)
        stats["environment/failed"] = Sum(ends.count("failed"))
    return stats
