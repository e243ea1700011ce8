"""Preference optimization: DPO and its kin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from burnish.config.preferences import PreferenceSettings
from burnish.config.schema import DataConfig, RunConfig
from burnish.errors import BurnishError, UsageError, count_text
from burnish.extend import PREFERENCE_LOSSES
from burnish.functions import did_you_mean
from burnish.methods.offline import OfflineMethod

if TYPE_CHECKING:
    from burnish.data.preferences import PreferenceDataset
    from burnish.engines.base import LossFn
    from burnish.methods.parts.offline_training import Models
    from burnish.plan.model import Workload
    from burnish.records import Batch
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress
    from burnish.tracking.stats import Stats

_WITHOUT_REFERENCE = ("simpo", "orpo", "nll")
"""Losses that take no reference."""


class DPO(OfflineMethod):
    """Prefer the chosen answer of each pair to the rejected one (DPO, arXiv 2305.18290, and others)."""

    name = "dpo"
    title = "preference optimization"
    help = "Learn from pairs of answers, of which one was preferred. The same command again resumes the run."
    lr = 1e-6
    lora_lr = 1e-5
    Settings = PreferenceSettings
    card = ("batch.examples", "method.loss", "method.beta")

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        from dataclasses import replace

        from burnish.plan.model import Workload

        work = Workload.of_examples(config.batch, config.data)
        has_reference = self.keeps_start(config)
        return replace(
            work,
            sequences=2 * work.sequences,
            scorings=int(has_reference),
            has_reference=has_reference,
        )

    def keeps_start(self, config: RunConfig) -> bool:
        """See `OfflineMethod.keeps_start`."""
        return bool(self.settings(config).reference == "initial")

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from super().problems(config)
        settings = self.settings(config)
        for name in settings.loss:
            if name not in PREFERENCE_LOSSES and ":" not in name:
                yield UsageError(
                    f"method.loss: there is no preference loss {name}",
                    want=f"{', '.join(PREFERENCE_LOSSES)}, or file.py:function",
                    do=did_you_mean(name, PREFERENCE_LOSSES) or "correct method.loss",
                )
            elif (
                settings.reference == "none" and name not in _WITHOUT_REFERENCE and ":" not in name
            ):
                yield UsageError(
                    f"method.loss: {name} compares the model with a reference",
                    have="method.reference: none",
                    want=f"a reference, or {', '.join(_WITHOUT_REFERENCE)}",
                    do="remove method.reference",
                )
        if not settings.loss:
            yield UsageError(
                "method.loss names no loss",
                want="at least one",
                do="remove method.loss, for sigmoid",
            )

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        settings = self.settings(config)
        yield "step", count_text(config.batch.examples, "pair")
        losses = (
            name if weight == 1 else f"{weight:g} {name}" for name, weight in settings.loss.items()
        )
        yield "loss", f"{' + '.join(losses)}, beta {settings.beta:g}"

    def prompt_of(self, rows: Any, config: DataConfig) -> Any:
        """See `Method.prompt_of`."""
        from burnish.data.columns import preference_prompt_column, prompt_at

        settings = PreferenceSettings()
        column = preference_prompt_column(
            config, rows, (settings.chosen_column, settings.rejected_column)
        )
        return None if column is None else prompt_at(rows[0], column)

    def dataset(
        self,
        foundation: Foundation,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: Any = None,
    ) -> PreferenceDataset:
        """See `Method.dataset`."""
        from burnish.runs.setup import preference_dataset

        settings = self.settings(foundation.config)
        columns = settings.chosen_column, settings.rejected_column
        return preference_dataset(foundation, paths, setting, columns, first, progress)

    def prepare(self, models: Models, batch: Batch) -> tuple[Batch, Stats]:
        """Add the reference's log-probs."""
        from burnish.tracking.stats import Stats

        return (batch if models.start is None else models.start_logprobs(batch)), Stats({})

    def measure(self, models: Models, batch: Batch) -> Stats:
        """Return the loss and the statistics of held-out pairs. Collective."""
        from burnish.tracking.stats import Mean, Stats

        batch, _ = self.prepare(models, batch)
        loss = self.loss(models.foundation.config)
        stats = Stats({"loss": Mean(0.0, 0.0)})
        for outputs, micro in zip(models.policy.forward(batch), batch.microbatches, strict=True):
            micro = micro.to(outputs.logprobs.device)
            part, own = loss(outputs, micro)
            pairs = micro.num_sequences // 2
            own["loss"] = Mean(part.detach() * pairs, (micro.cu_seqlens.numel() - 1) // 2)
            stats = stats.merge(own)
        return stats

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.preferences import pair_loss

        return pair_loss(self.settings(config))
