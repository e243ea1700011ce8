"""Reward models: a scalar head that learns which of two answers was preferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from burnish.config.preferences import RewardSettings
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError
from burnish.methods.pairs import PairMethod

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.engines.base import LossFn
    from burnish.records import MicroBatch, TokenOutputs
    from burnish.runs.setup import Foundation


class RewardModeling(PairMethod):
    """Learn a reward from pairs of answers: -log σ(r_c - r_l) (Bradley and Terry; arXiv 2203.02155, equation 1)."""

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
        if config.model.adapter and config.engine.kind != "torch":
            yield UsageError(
                "adapters of reward models are trained by the torch engine alone",
                have=f"engine.kind: {config.engine.kind}",
                want="engine.kind: torch, or no model.lora",
                do="remove one of the two",
            )

    def foundation(self, foundation: Foundation) -> Foundation:
        """Return the backbone with transformers' head for sequence classification, of one label."""
        from burnish.methods.parts.critic import valued
        from burnish.models.value_head import classifier_config

        hf_config = classifier_config(foundation.hf_config, foundation.tokenizer.pad_token_id)
        judge = valued(foundation, foundation.config.model, hf_config)
        if foundation.adapter is None:
            return judge
        from burnish.methods.parts.adapted_judge import adapted_judge

        return adapted_judge(judge, foundation.adapter["base"])

    def rewards(self, config: RunConfig) -> Callable[[TokenOutputs, MicroBatch], Tensor]:
        """See `PairMethod.rewards`."""
        from burnish.algorithms.preferences import values_after_texts

        return values_after_texts

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.preferences import reward_loss

        return reward_loss(self.settings(config).center)
