"""Data sets of preferences for a run."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.config.preferences import PairSettings, RewardSettings
from burnish.data.preference_columns import answer_columns
from burnish.data.preferences import PreferenceDataset
from burnish.data.ranked_rows import RankedRows
from burnish.data.steps import StepDataset
from burnish.runs.setup import Foundation, example_limit, run_rows
from burnish.tracking.progress import Progress


def preference_dataset(
    foundation: Foundation,
    paths: Sequence[str],
    setting: str,
    settings: PairSettings,
    first: int | None = None,
    progress: Progress | None = None,
    *,
    is_judged: bool = False,
) -> PreferenceDataset:
    """Read the answers in `paths`, or in their `first` rows. Collective. `settings`, `is_judged`: see `PreferenceDataset`."""
    rows = RankedRows.of(run_rows(foundation, paths, setting, progress).first(first), settings)
    answers = answer_columns(foundation.config.data, rows, settings)
    limit, name = example_limit(foundation, setting, sharing=len(answers))
    return PreferenceDataset(
        rows,
        foundation.tokenizer,
        foundation.config.data,
        settings,
        limit,
        progress,
        foundation.layout,
        foundation.eos_token_ids,
        limit_name=name,
        is_judged=is_judged,
    )


def step_dataset(
    foundation: Foundation,
    paths: Sequence[str],
    setting: str,
    settings: RewardSettings,
    first: int | None = None,
    progress: Progress | None = None,
) -> StepDataset:
    """Read the answers in steps in `paths`, or in their `first` rows. Collective."""
    rows = run_rows(foundation, paths, setting, progress).first(first)
    limit, name = example_limit(foundation, setting)
    return StepDataset(
        rows,
        foundation.tokenizer,
        foundation.config.data,
        settings,
        limit,
        progress,
        foundation.layout,
        foundation.eos_token_ids,
        limit_name=name,
    )
