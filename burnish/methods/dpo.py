"""Preference optimization: DPO and its kin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from burnish.config.frozen_models import FrozenModel
from burnish.config.preferences import PairLossSettings, PreferenceSettings
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError, count_text
from burnish.extend import ANSWER_LOSSES, PREFERENCE_LOSSES
from burnish.functions import did_you_mean
from burnish.methods.pairs import PairMethod

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.data.preferences import PreferenceDataset
    from burnish.data.tasks import ItemSequence
    from burnish.distributed.layout import Layout
    from burnish.engines.base import LossFn
    from burnish.methods.parts.offline_training import Models
    from burnish.plan.model import Workload
    from burnish.records import Batch, MicroBatch, TokenOutputs
    from burnish.runs.session import Session
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress
    from burnish.tracking.stats import Stats

_WITHOUT_REFERENCE = ("simpo", "orpo", "nll")
"""Losses that take no reference."""
_WITH_MARGIN = ("sigmoid", "hinge", "robust", "simpo")
"""Losses that take the margin of a row."""
_log = logging.getLogger(__name__)


def loss_problems(
    losses: Mapping[str, float], known: Collection[str], reference: str
) -> Iterator[BurnishError]:
    """Yield why these losses do not exist or lack a reference."""
    for name in losses:
        if name not in known and ":" not in name:
            yield UsageError(
                f"method.loss: there is no preference loss {name}",
                want=f"{', '.join(known)}, or file.py:function",
                do=did_you_mean(name, known) or "correct method.loss",
            )
        elif reference == "none" and name not in _WITHOUT_REFERENCE and ":" not in name:
            yield UsageError(
                f"method.loss: {name} compares the model with a reference",
                have="method.reference: none",
                want=f"a reference, or {', '.join(_WITHOUT_REFERENCE)}",
                do="remove method.reference",
            )
    if not any(losses.values()):
        yield UsageError(
            "method.loss names no loss to learn from",
            have=f"weights {[*losses.values()]}",
            want="at least one that is not 0",
            do="remove method.loss, for sigmoid",
        )


def loss_text(settings: PairLossSettings) -> str:
    """Return the weighted losses and beta in words."""
    losses = (
        name if weight == 1 else f"{weight:g} {name}" for name, weight in settings.loss.items()
    )
    return f"{' + '.join(losses)}, beta {settings.beta:g}"


class DPO(PairMethod):
    """Prefer the chosen answer of each pair to the rejected one (DPO, arXiv 2305.18290, and others)."""

    name = "dpo"
    title = "preference optimization"
    help = "Learn from pairs of answers, of which one was preferred. The same command again resumes the run."
    lr = 1e-6
    lora_lr = 1e-5
    Settings = PreferenceSettings
    card = ("batch.examples", "method.loss", "method.beta")

    def terms(self, config: RunConfig, micro: MicroBatch) -> int:
        """See `PairMethod.terms`."""
        is_of_answers = self.settings(config).is_of_answers
        return micro.num_sequences if is_of_answers else micro.num_sequences // 2

    def keeps_start(self, config: RunConfig) -> bool:
        """See `OfflineMethod.keeps_start`. Of streamed rows nothing is computed before training."""
        return bool(self.settings(config).reference == "initial" and config.data.streaming)

    def before_training(
        self,
        items: ItemSequence[Any],
        rows: Sequence[int] | None,
        foundation: Foundation,
        session: Session,
    ) -> ItemSequence[Any]:
        """See `OfflineMethod.before_training`: the reference's log-probs."""
        from burnish.methods.parts.references import referenced

        settings = self.settings(foundation.config)
        if settings.reference == "none" or foundation.config.data.streaming:
            return items
        kind = ""
        if settings.is_of_answers:  # with mismatched ones, which end at the limit
            config = foundation.config
            most = config.data.max_length
            kind = f"kto {most} {config.sequence_limit(most or 0)}"
        own = next(self.frozen(foundation.config), None)
        return referenced(items, rows, foundation, session, own, kind)

    def frozen(self, config: RunConfig) -> Iterator[FrozenModel]:
        """See `Method.frozen`: a reference of one's own, whose log-probs are computed before training."""
        if (path := self.settings(config).reference_path) is not None:
            yield FrozenModel(path, "method.reference", "reference", "log-probs", "start")

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from super().problems(config)
        settings = self.settings(config)
        known = {**PREFERENCE_LOSSES, **ANSWER_LOSSES}
        yield from loss_problems(settings.loss, known, settings.reference)
        if settings.reference_path is not None and config.data.streaming:
            yield UsageError(
                "the log-probs of a reference of one's own are computed before training, and streamed rows are read during it",
                have=f"data.streaming: {config.data.streaming}, method.reference: {settings.reference}",
                want="rows that are read before, or method.reference: initial",
                do="remove one of the two",
            )
        if settings.is_of_answers:
            yield from self._problems_of_answers(config)

    def _problems_of_answers(self, config: RunConfig) -> Iterator[BurnishError]:
        settings = self.settings(config)
        if others := [name for name in settings.loss if name not in ANSWER_LOSSES]:
            yield UsageError(
                "method.loss: kto judges single answers, and other losses compare two",
                have=", ".join(settings.loss),
                want="kto alone, or losses of pairs",
                do=f"remove {', '.join(others)}, or kto",
            )
        if settings.length_normalized:
            yield UsageError(
                "method.length_normalized is not defined for kto",
                want="log-ratios of whole answers, as in its paper",
                do="remove method.length_normalized",
            )
        if config.data.streaming and config.batch.examples < 2:
            yield UsageError(
                "kto reads each prompt with the answer to another one too, of streamed rows one of the same step",
                have=f"data.streaming: {config.data.streaming}, batch.examples: {config.batch.examples}",
                want="at least 2 rows a step",
                do="raise batch.examples, or remove data.streaming",
            )

    def functions(self, config: RunConfig) -> Sequence[str]:
        """See `Method.functions`."""
        return [name for name in self.settings(config).loss if ":" in name]

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        settings = self.settings(config)
        if settings.is_of_answers:
            yield "step", count_text(config.batch.examples, "row")
        else:
            yield from super().facts(config)
        yield "loss", loss_text(settings)

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
        dataset = cast(
            "PreferenceDataset",
            super().dataset(foundation, paths, setting, first=first, progress=progress, pool=pool),
        )
        losses = self.settings(foundation.config).loss
        without = [name for name in losses if ":" not in name and name not in _WITH_MARGIN]
        is_told = setting == "data.train" and foundation.layout.is_main
        if dataset.margins and without and is_told:
            columns = " and ".join(dataset.margins)
            _log.warning("%s: margins of rows (%s) are not used", ", ".join(without), columns)
        return dataset

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`. Beside single answers, the model reads mismatched ones."""
        work = super().workload(config)
        if not self.settings(config).is_of_answers:
            return work
        return replace(work, sequences=work.sequences // 2, scorings=1)

    def batch(
        self, dataset: ItemSequence[Any], rows: Sequence[int], models: Foundation, layout: Layout
    ) -> Batch:
        """See `OfflineMethod.batch`. The mismatched answers of kto lie beside the batch."""
        from burnish.methods.parts.offline_training import batch_of

        if not self.settings(models.config).is_of_answers:
            return super().batch(dataset, rows, models, layout)
        items = dataset.items(rows)
        if models.config.data.streaming:
            from burnish.data.preferences import PreferenceDataset
            from burnish.data.streaming import Stream

            if isinstance(dataset, Stream) and isinstance(dataset.parts[0], PreferenceDataset):
                items = dataset.parts[0].joined_within(items)
        answers, mismatched = ([item[part::2] for item in items] for part in (0, 1))
        beside = batch_of(mismatched, models, layout)
        return replace(batch_of(answers, models, layout), beside=beside)

    def prepare(self, models: Models, batch: Batch) -> tuple[Batch, Stats]:
        """Add the reference's log-probs to streamed rows, and kto's reference point."""
        from burnish.tracking.stats import Stats

        if models.start is not None:
            beside = batch.beside and models.start_logprobs(batch.beside)
            batch = replace(models.start_logprobs(batch), beside=beside)
        if batch.beside is None:
            return batch, Stats({})
        return _with_kl(models, batch, batch.beside)

    def rewards(self, config: RunConfig) -> Callable[[TokenOutputs, MicroBatch], Tensor] | None:
        """See `PairMethod.rewards`."""
        from burnish.algorithms.preferences import implicit_rewards

        return implicit_rewards(self.settings(config))

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.preferences import answer_loss, pair_loss

        settings = self.settings(config)
        return answer_loss(settings) if settings.is_of_answers else pair_loss(settings)


def _with_kl(models: Models, batch: Batch, mismatched: Batch) -> tuple[Batch, Stats]:
    """Add the mean log-ratio of mismatched answers, at least 0; return it, as it is, with this rank's part. Collective."""
    from burnish.distributed.collectives import reduce_stats
    from burnish.tracking.stats import Mean, Stats

    stats = Stats({"kl": Mean(0.0, 0.0)})
    parts = zip(
        models.policy.forward(mismatched), mismatched.microbatches, mismatched.examples, strict=True
    )
    for outputs, micro, numbers in parts:
        ratios = outputs.logprobs - micro.given("ref_logprobs").to(outputs.logprobs.device)
        count = sum(number >= 0 for number in numbers)
        stats = stats.merge(Stats({"kl": Mean(ratios.sum(), count)}))
    whole = reduce_stats(stats, models.policy.layout, models.foundation.device)
    kl = max(0.0, whole["kl"].value())
    micros = tuple(replace(micro, kl=kl) for micro in batch.microbatches)
    return replace(batch, microbatches=micros), stats
