"""Compute statistics of a step's rollouts; warn of failing reward functions."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from burnish.errors import BurnishError
from burnish.records import Rollout
from burnish.tracking.stats import Max, Mean, Stats, Sum

log = logging.getLogger("burnish")


class Complaints:
    """Warn once of each kind of failure of reward functions.

    End the run if all rollouts fail, round after round.
    """

    def __init__(self, most_rounds: int) -> None:
        """`most_rounds`: that fail wholly, one after the other, are not borne."""
        self._heard: set[str] = set()
        self._most_rounds = most_rounds
        self._lost_in_a_row = 0

    def hear(self, rollouts: Sequence[Rollout]) -> None:
        """Warn of new kinds of failures in this round.

        Raises `BurnishError` if all rollouts failed, as in the rounds before.
        """
        failed = [rollout.reward_error for rollout in rollouts if rollout.reward_error is not None]
        for error in failed:
            kind = ":".join(error.split(":", 2)[:2])
            if kind not in self._heard:
                self._heard.add(kind)
                log.warning(
                    "reward functions failed for %d of %d completions, which count as reward.on_error: %s",
                    len(failed),
                    len(rollouts),
                    error,
                )
        self._lost_in_a_row = self._lost_in_a_row + 1 if 0 < len(failed) == len(rollouts) else 0
        if self._lost_in_a_row >= self._most_rounds:
            raise BurnishError(
                f"reward functions failed for every completion of {self._lost_in_a_row} rounds in a row",
                have=failed[-1],
                want="an answer for some completions at least",
                do="mend the function and start the run again, which goes on from its latest checkpoint; "
                "reward.max_failed_rounds sets how many such rounds are borne",
            )


def rollout_stats(rollouts: Sequence[Rollout]) -> Stats:
    """Return statistics of scored rollouts, which merge over ranks if no group is cut.

    In training they cover all that a step generated, also groups that dynamic sampling left out. A
    group is the rollouts of one prompt with different sample indices.

    - `reward/mean`; `reward/parts/NAME`, the mean of each function's own value, and of each further number as NAME/ITS_NAME
    - `reward/std`: mean over groups of the (population) standard deviation within the group
    - `reward/zero_std_frac`: share of groups whose rewards are all equal, which teach nothing
    - `reward/errors`: rollouts with an error in a reward function
    - `response_length/mean`, `/max` in tokens, `/clip_ratio`: share of completions cut at their limit
    """
    if not rollouts:
        return Stats()
    count = len(rollouts)
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    met: Counter[tuple[int, int]] = Counter()
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        sample = (rollout.prompt.index, rollout.sample)
        groups[rollout.prompt.index, met[sample]].append(rollout.reward)
        met[sample] += 1
        for name, value in rollout.reward_parts.items():
            parts[name].append(value)
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    flat = sum(len(set(group)) == 1 for group in groups.values())
    cut = sum(rollout.completion.stop_reason == "length" for rollout in rollouts)
    failed = sum(rollout.reward_error is not None for rollout in rollouts)
    stats = Stats(
        {
            "reward/mean": Mean(sum(rollout.reward for rollout in rollouts), count),
            "reward/std": Mean(sum(float(np.std(g)) for g in groups.values()), len(groups)),
            "reward/zero_std_frac": Mean(flat, len(groups)),
            "reward/errors": Sum(failed),
            "response_length/mean": Mean(sum(lengths), count),
            "response_length/max": Max(max(lengths)),
            "response_length/clip_ratio": Mean(cut, count),
        }
    )
    for name, values in parts.items():
        stats[f"reward/parts/{name}"] = Mean(sum(values), len(values))
    return stats
