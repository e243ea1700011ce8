"""Statistics of a step's rollouts, and warnings of failing reward functions."""

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
    """Warn once of each kind of failure, and end a run without rewards."""

    def __init__(self, most_rounds: int) -> None:
        self._heard: set[str] = set()
        self._most_rounds = most_rounds
        self._lost_in_a_row = 0
        self._is_answered = False
        self._last: Rollout | None = None

    def hear(self, rollouts: Sequence[Rollout]) -> None:
        """Warn of new kinds of failures in this round.

        Raises `BurnishError` if all rollouts failed in `most_rounds` in a row, or in one way in the first.
        """
        failed = [rollout for rollout in rollouts if rollout.reward_error is not None]
        kinds: dict[str, str] = {}
        for rollout in failed:
            error = str(rollout.reward_error)
            kinds.setdefault(":".join(error.split(":", 2)[:2]), error)
        for kind in [kind for kind in kinds if kind not in self._heard]:
            self._heard.add(kind)
            log.warning(
                "reward functions failed for %d of %d completions, which count as reward.on_error: %s",
                len(failed),
                len(rollouts),
                kinds[kind],
            )
        is_first = self._last is None and not self._is_answered
        if len(failed) < len(rollouts):
            self._lost_in_a_row, self._is_answered = 0, True
        elif failed:
            self._lost_in_a_row, self._last = self._lost_in_a_row + 1, failed[-1]
            if is_first and len(kinds) == 1:
                raise _no_rewards(failed[-1], "of the first round")
            if self._lost_in_a_row >= self._most_rounds:
                raise _no_rewards(failed[-1], f"of {self._lost_in_a_row} rounds in a row")

    def require_answer(self) -> None:
        """Raise `BurnishError` at the end of a run in which every completion failed."""
        if self._last is not None and not self._is_answered:
            raise _no_rewards(self._last, "of the run")


def _no_rewards(rollout: Rollout, when: str) -> BurnishError:
    return BurnishError(
        f"reward functions failed for every completion {when}",
        have=rollout.reward_error,
        want="an answer for some completions at least",
        do=f"mend the function{message_hint(rollout)}; then start the run again, which goes on from its latest "
        "checkpoint. reward.max_failed_rounds sets how many such rounds are borne after the first",
    )


def message_hint(rollout: Rollout) -> str:
    """Return how to read a completion, if an error is about a list of messages."""
    if rollout.prompt.messages is None or "list" not in str(rollout.reward_error):
        return ""
    return (
        ": completions are lists of messages here, because prompts are conversations. "
        'The text of one is completion[-1]["content"]'
    )


def rollout_stats(rollouts: Sequence[Rollout]) -> Stats:
    """Return `reward/...` and `response_length/...` of scored rollouts.

    `reward/std` is the mean over groups of the (population) standard deviation.
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
