"""Choose the rollouts of a report: the best, the worst, and the prompts whose reward changed most.

Best and worst come from the newest file, one per prompt; changes compare the earliest and latest answers. Files are read from both
ends up to a budget of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from burnish.tracking.jsonl import number
from burnish.tracking.rollouts import read_rollouts, rollout_files

_READ_BYTES = 32_000_000
"""Most rollouts read, in bytes of their files; the newest and the oldest file are always read."""
_TEXT_LIMIT = 3000
"""Characters of a prompt or completion that are shown."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One rollout as the report shows it."""

    step: int
    """The step it was made in."""
    prompt_index: int
    """Names the prompt."""
    prompt: str
    """The prompt, shortened in the middle where it is long."""
    completion: str
    """The completion, shortened in the same way."""
    answer: str | None
    """The ground truth, where there is one."""
    reward: float
    """Its reward; NaN where it was not finite."""
    reward_parts: dict[str, float]
    """Each reward function's value."""
    reward_error: str | None
    """Why a reward function gave no answer."""
    advantage: float
    """Its advantage."""
    stop_reason: str
    """stop or length."""
    length: int
    """Tokens generated."""


@dataclass(frozen=True, slots=True)
class ExampleChange:
    """The same prompt, early and late in the run."""

    early: Shown
    """The answer nearest to the early mean reward."""
    late: Shown
    """The answer nearest to the late mean reward."""
    early_mean: float
    """Mean reward over the prompt's samples, early."""
    late_mean: float
    """The same, late."""


@dataclass(frozen=True, slots=True)
class Examples:
    """What a report shows of a run's rollouts."""

    step: int
    """The step of the best and the worst."""
    best: list[Shown]
    """Highest reward first."""
    worst: list[Shown]
    """Lowest reward first."""
    changed: list[ExampleChange]
    """Largest change of the mean reward first, in either direction."""


def choose_examples(directory: Path, count: int = 3) -> Examples | None:
    """Return up to `count` of each kind from a directory of rollouts; None without rollouts.

    Raises `CorruptError` for a file that holds none.
    """
    files = rollout_files(directory)
    groups: dict[int, dict[int, list[Shown]]] = {}
    for path in _within_budget([path for _, path in files]):
        for row in read_rollouts(path):
            shown = _shown(row)
            groups.setdefault(shown.prompt_index, {}).setdefault(shown.step, []).append(shown)
    if not groups:
        return None
    newest = max(step for by_step in groups.values() for step in by_step)
    latest = [by_step[newest] for by_step in groups.values() if newest in by_step]
    best = [max(group, key=lambda shown: _order(shown.reward)) for group in latest]
    worst = [min(group, key=lambda shown: _order(shown.reward)) for group in latest]
    return Examples(
        newest,
        sorted(best, key=lambda shown: (-_order(shown.reward), shown.prompt_index))[:count],
        sorted(worst, key=lambda shown: (_order(shown.reward), shown.prompt_index))[:count],
        _changes(groups.values(), count),
    )


def _within_budget(paths: list[Path]) -> list[Path]:
    """The newest, the oldest, the second newest, ... as long as the budget lasts."""
    chosen: list[Path] = []
    spent = 0
    first, last = 0, len(paths) - 1
    while first <= last:
        from_end = len(chosen) % 2 == 0
        path = paths[last if from_end else first]
        spent += path.stat().st_size
        if len(chosen) >= 2 and spent > _READ_BYTES:
            break
        chosen.append(path)
        first, last = (first, last - 1) if from_end else (first + 1, last)
    return chosen


def _changes(groups: Iterable[dict[int, list[Shown]]], count: int) -> list[ExampleChange]:
    changes = []
    for by_step in groups:
        early, late = by_step[min(by_step)], by_step[max(by_step)]
        means = [fmean(_finite(shown.reward) for shown in group) for group in (early, late)]
        if means[0] != means[1]:
            pair = (_typical(early, means[0]), _typical(late, means[1]))
            changes.append(ExampleChange(*pair, *means))
    changes.sort(
        key=lambda change: (-abs(change.late_mean - change.early_mean), change.early.prompt_index)
    )
    return changes[:count]


def _typical(group: list[Shown], mean: float) -> Shown:
    return min(group, key=lambda shown: abs(_finite(shown.reward) - mean))


def _order(reward: float) -> float:
    """NaN is worse than anything."""
    return -math.inf if math.isnan(reward) else reward


def _finite(reward: float) -> float:
    return reward if math.isfinite(reward) else 0.0


def _shown(row: dict[str, Any]) -> Shown:
    return Shown(
        step=int(row["step"]),
        prompt_index=int(row["prompt_index"]),
        prompt=_shortened(row["prompt"]),
        completion=_shortened(row["completion"]),
        answer=None if row.get("answer") is None else _shortened(row["answer"]),
        reward=number(row["reward"]),
        reward_parts={name: number(value) for name, value in row.get("reward_parts", {}).items()},
        reward_error=row.get("reward_error"),
        advantage=number(row.get("advantage", math.nan)),
        stop_reason=str(row.get("stop_reason", "")),
        length=int(row.get("length", 0)),
    )


def _shortened(text: str) -> str:
    """The beginning and the end of a long text, with what was left out counted."""
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
