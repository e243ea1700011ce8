"""Data sets of preferences for a run."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.config.preferences import PairSettings, RewardSettings
from burnish.data.preference_columns import answer_columns
from burnish.data.preferences import PreferenceDataset
from burnish.data.ranked_rows import RankedRows
from burnish.data.steps import StepDataset
from burnish.runs.example_limits import example_limit, tell_long_examples
from burnish.runs.setup import Foundation, run_rows
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
    limits = foundation.config.example_limits(len(answers))
    limit, name = example_limit(limits, foundation.hf_config)
    dataset = PreferenceDataset(
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
    if foundation.layout.is_main:
        tell_long_examples(foundation.hf_config, dataset, setting)
    return dataset


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
    limit, name = example_limit(foundation.config.example_limits(), foundation.hf_config)
    dataset = StepDataset(
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
    if foundation.layout.is_main:
        tell_long_examples(foundation.hf_config, dataset, setting)
    return dataset
