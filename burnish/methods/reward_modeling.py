"""Reward models: a scalar head that learns which of two answers was preferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from burnish.config.preferences import RewardSettings
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError, count_text
from burnish.methods.pairs import PairMethod

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.data.preferences import PreferenceDataset
    from burnish.data.steps import StepDataset
    from burnish.engines.base import LossFn
    from burnish.plan.model import Workload
    from burnish.records import MicroBatch, TokenOutputs
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress


class RewardModeling(PairMethod):
    """Learn a reward from pairs of answers: -log σ(r_c - r_l) (Bradley and Terry; arXiv 2203.02155, equation 1).

    Or, with a separator of steps, of each step by its label.
    """

    name = "rm"
    title = "reward modelling"
    help = "Train a reward model on pairs of answers, of which one was preferred. The same command again resumes the run."
    lr = 1e-5
    lora_lr = 1e-4
    Settings = RewardSettings
    is_judged = True
    card = ("batch.examples", "method.center")

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from super().problems(config)
        if config.model.train:
            yield UsageError(
                "a reward model is trained whole, or by an adapter, because its head is new",
                have="model.train",
                want="all weights trained, or model.lora",
                do="remove model.train",
            )

    def foundation(self, foundation: Foundation) -> Foundation:
        """Return the backbone with transformers' head for sequence classification, of one label."""
        from burnish.methods.parts.critic import valued
        from burnish.models.value_head import classifier_config, value_config

        if self._is_by_step(foundation.config):
            hf_config = value_config(foundation.hf_config)
        else:
            hf_config = classifier_config(foundation.hf_config, foundation.tokenizer.pad_token_id)
        judge = valued(foundation, foundation.config.model, hf_config)
        if foundation.adapter is None:
            return judge
        from burnish.methods.parts.adapted_scorer import adapted_scorer

        return adapted_scorer(judge, foundation.adapter["base"])

    def _is_by_step(self, config: RunConfig) -> bool:
        return self.settings(config).step_separator is not None

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        if self._is_by_step(config):
            yield "step", count_text(config.batch.examples, "row")
        else:
            yield from super().facts(config)

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        work = super().workload(config)
        is_by_step = self._is_by_step(config)
        return replace(work, sequences=work.sequences // 2) if is_by_step else work

    def dataset(
        self,
        foundation: Foundation,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: Any = None,
    ) -> PreferenceDataset | StepDataset:
        """See `Method.dataset`."""
        if not self._is_by_step(foundation.config):
            return super().dataset(
                foundation, paths, setting, first=first, progress=progress, pool=pool
            )
        from burnish.runs.preference_setup import step_dataset

        settings = self.settings(foundation.config)
        return step_dataset(foundation, paths, setting, settings, first, progress)

    def terms(self, config: RunConfig, micro: MicroBatch) -> int:
        """See `PairMethod.terms`."""
        return micro.num_tokens if self._is_by_step(config) else super().terms(config, micro)

    def rewards(self, config: RunConfig) -> Callable[[TokenOutputs, MicroBatch], Tensor] | None:
        """See `PairMethod.rewards`."""
        from burnish.algorithms.preferences import values_after_texts

        return None if self._is_by_step(config) else values_after_texts

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.preferences import reward_loss, step_loss

        is_by_step = self._is_by_step(config)
        return step_loss if is_by_step else reward_loss(self.settings(config).center)
