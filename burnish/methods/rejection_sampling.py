"""Rejection sampling: fine-tune on the best of the model's own completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import count_text
from burnish.methods.best_of_n import BestOfN

if TYPE_CHECKING:
    from burnish.engines.base import LossFn
    from burnish.records.rollout_table import RolloutTable


class RejectionSettings(Section):
    """Which completions a step learns from: `burnish rejection-sampling`."""

    keep: int = Field(1, ge=1)
    """How many completions of a prompt, those with the highest rewards."""
    least_reward: float | None = None
    """The least reward of a completion to learn from. Default: the best ones count, however low their rewards are."""


class RejectionSampling(BestOfN):
    """Fine-tune on the completions of each prompt that have the highest rewards (RAFT, arXiv 2304.06767)."""

    name = "rejection-sampling"
    title = "rejection sampling"
    help = "Draw completions and fine-tune on the best of each prompt. The same command again resumes the run."
    Settings = RejectionSettings
    card = ("rollout.n", "method.keep", "batch.prompts")

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        yield from super().facts(config)
        yield (
            "learns from",
            f"the best {count_text(self.settings(config).keep, 'completion')} of a prompt",
        )

    def select(self, config: RunConfig, groups: RolloutTable) -> RolloutTable:
        """See `RL.select`."""
        import numpy as np

        settings = self.settings(config)
        firsts = groups.firsts
        numbers = np.arange(len(firsts))
        usable = numbers[groups.is_scored & (firsts == numbers)]
        if settings.least_reward is not None:
            usable = usable[groups.rewards[usable] >= settings.least_reward]
        order = usable[np.lexsort((-groups.rewards[usable], groups.groups[usable]))]
        _, starts, counts = np.unique(groups.groups[order], return_index=True, return_counts=True)
        places = np.arange(len(order)) - np.repeat(starts, counts)
        best = np.isin(firsts, order[places < settings.keep])  # with the branches of a conversation
        return groups.with_rewards(np.where(best, groups.rewards, np.nan))

    def loss(self, config: RunConfig) -> LossFn:
        """See `RL.loss`."""
        from burnish.algorithms.fine_tuning import sft_loss

        return sft_loss()
