"""Preference optimization: DPO and its kin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from burnish.config.preferences import PreferenceSettings
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError
from burnish.extend import PREFERENCE_LOSSES
from burnish.functions import did_you_mean
from burnish.methods.pairs import PairMethod

if TYPE_CHECKING:
    from burnish.engines.base import LossFn
    from burnish.methods.parts.offline_training import Models
    from burnish.records import Batch
    from burnish.tracking.stats import Stats

_WITHOUT_REFERENCE = ("simpo", "orpo", "nll")
"""Losses that take no reference."""


class DPO(PairMethod):
    """Prefer the chosen answer of each pair to the rejected one (DPO, arXiv 2305.18290, and others)."""

    name = "dpo"
    title = "preference optimization"
    help = "Learn from pairs of answers, of which one was preferred. The same command again resumes the run."
    lr = 1e-6
    lora_lr = 1e-5
    Settings = PreferenceSettings
    card = ("batch.examples", "method.loss", "method.beta")

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
        yield from super().facts(config)
        losses = (
            name if weight == 1 else f"{weight:g} {name}" for name, weight in settings.loss.items()
        )
        yield "loss", f"{' + '.join(losses)}, beta {settings.beta:g}"

    def prepare(self, models: Models, batch: Batch) -> tuple[Batch, Stats]:
        """Add the reference's log-probs."""
        from burnish.tracking.stats import Stats

        return (batch if models.start is None else models.start_logprobs(batch)), Stats({})

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.preferences import pair_loss

        return pair_loss(self.settings(config))
