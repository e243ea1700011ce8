"""Supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from burnish.config.frozen_models import FrozenModel, teachers
from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import BurnishError, UsageError
from burnish.extend import FINE_TUNING_LOSSES
from burnish.functions import no_function
from burnish.methods.offline import OfflineMethod

if TYPE_CHECKING:
    from burnish.data.examples import ExampleDataset
    from burnish.data.tasks import ItemSequence
    from burnish.distributed.layout import Layout
    from burnish.engines.base import LossFn
    from burnish.methods.parts.offline_training import Models
    from burnish.plan.model import Workload
    from burnish.records import Batch
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress
    from burnish.tracking.stats import Stats


class FineTuningSettings(Section):
    """How a model learns from examples: `burnish sft`."""

    loss: str = "nll"
    """The loss of a token: nll, its negative log-likelihood; dft, the same times the token's probability (arXiv 2508.05629), so that unlikely tokens weigh less; or file.py:function."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """ε of label smoothing (arXiv 1512.00567): the loss is (1 - ε) times the negative log-likelihood, plus ε times its mean over all tokens of the vocabulary."""
    weight_column: str | None = None
    """A column of numbers that multiply the losses of their rows. 0: the row is dropped. Default: all rows count the same."""


class SFT(OfflineMethod):
    """Maximize the log-likelihood of the trained tokens of examples."""

    name = "sft"
    title = "supervised fine-tuning"
    help = "Fine-tune a model on examples. The same command again resumes the run."
    lr = 1e-5
    # As QLoRA (arXiv 2305.14314), and recipes of TRL, axolotl and Unsloth.
    lora_lr = 2e-4
    trains_mtp = True
    Settings = FineTuningSettings
    unread = tuple(name for name in OfflineMethod.unread if name != "distill")

    def named(self, config: RunConfig) -> RunConfig:
        """See `Method.named`. Runs of earlier versions recorded no settings."""
        named = super().named(config)
        is_plain = self.settings(config) == FineTuningSettings()
        return named.model_copy(update={"method": {}}) if is_plain else named

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from super().problems(config)
        name = self.settings(config).loss
        if name not in FINE_TUNING_LOSSES and ":" not in name:
            yield no_function(name, "method.loss", FINE_TUNING_LOSSES)
        others = [] if name == "nll" else [f"method.loss: {name}"]
        others += ["distill.teachers"] if config.distill.teachers else []
        if others and config.model.train_mtp:
            yield UsageError(
                "layers for multi-token prediction learn from the negative log-likelihood alone",
                have=f"model.train_mtp, and {', '.join(others)}",
                want="one or the other",
                do=f"remove model.train_mtp, or {', '.join(others)}",
            )
        others += ["engine.kind: megatron"] if config.engine.kind == "megatron" else []
        if others and self.settings(config).label_smoothing:
            yield UsageError(
                "label smoothing is for the negative log-likelihood, without teachers, on the torch engine",
                have=f"method.label_smoothing, and {', '.join(others)}",
                want="one or the other",
                do=f"remove method.label_smoothing, or {', '.join(others)}",
            )
        if config.distill.teachers:
            from burnish.config.teacher_problems import teacher_problems

            yield from teacher_problems(config, is_drawn=False)

    def dataset(
        self,
        foundation: Foundation,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: Any = None,
    ) -> ExampleDataset:
        """See `Method.dataset`."""
        from burnish.runs.setup import example_dataset

        # A validation measures the same for every weight.
        is_trained = setting == "data.train"
        column = self.settings(foundation.config).weight_column if is_trained else None
        dataset = example_dataset(foundation, paths, setting, first, progress, column)
        if is_trained and column is None and dataset.rows.has("weight"):
            logging.getLogger(__name__).warning(
                "the column 'weight' is not used: method.weight_column=weight makes it a factor of each row's loss"
            )
        return dataset

    def functions(self, config: RunConfig) -> Sequence[str]:
        """See `Method.functions`."""
        name = self.settings(config).loss
        return [name] if ":" in name else []

    def dry_runs(self, config: RunConfig) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs`."""
        from burnish.algorithms.fine_tuning import sft_loss

        yield partial(sft_loss, self.settings(config).loss)

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        yield from super().facts(config)
        if config.distill.teachers:
            yield "teacher", str(config.distill)

    def frozen(self, config: RunConfig) -> Iterator[FrozenModel]:
        """See `Method.frozen`."""
        yield from teachers(config)

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        work = super().workload(config)
        if self.settings(config).label_smoothing:
            work = replace(work, compares="uniform")
        return work.taught(config.distill)

    def dry_runs_of_models(self, foundation: Foundation) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs_of_models`."""
        yield from super().dry_runs_of_models(foundation)
        if foundation.config.distill.teachers:
            from burnish.methods.parts.distillation import dry_runs_of_teachers

            yield from dry_runs_of_teachers(foundation)

    def dry_runs_of_rows(self, foundation: Foundation) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs_of_rows`."""
        if foundation.config.distill.teachers:
            from burnish.methods.parts.distillation import require_sources

            yield partial(require_sources, foundation)

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.fine_tuning import sft_loss

        settings = self.settings(config)
        loss = sft_loss(settings.loss, settings.label_smoothing)
        if config.distill.teachers:
            from burnish.algorithms.distillation import vocabulary_distillation

            weight = config.distill.weight
            return vocabulary_distillation(loss, weight, 1 - weight, "token_mean", 1)
        return loss

    def batch(
        self, dataset: ItemSequence[Any], rows: Sequence[int], models: Foundation, layout: Layout
    ) -> Batch:
        """See `OfflineMethod.batch`. Teachers divide its examples by source."""
        from burnish.methods.parts.offline_training import batch_of

        if not models.config.distill.teachers:
            return super().batch(dataset, rows, models, layout)
        items = dataset.items(rows)
        return replace(batch_of(items, models, layout), sources=[each.source for each in items])

    def prepare(self, models: Models, batch: Batch) -> tuple[Batch, Stats]:
        """See `OfflineMethod.prepare`."""
        batch, stats = super().prepare(models, batch)
        if models.teachers is not None:
            teachers = models.teachers.of_sources(batch.sources)
            batch = models.teachers.taught(batch, teachers.__getitem__)
        elif self.settings(models.foundation.config).label_smoothing:
            from burnish.models.divergence import DivergenceProbe, UniformReference

            masks = [micro.loss_mask for micro in batch.microbatches]
            probes = [DivergenceProbe(UniformReference(), mask[mask]) for mask in masks]
            batch = batch.with_field("probe", probes)
        return batch, stats
