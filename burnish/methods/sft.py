"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burnish.config.schema import RunConfig
from burnish.methods.offline import OfflineMethod

if TYPE_CHECKING:
    from burnish.engines.base import LossFn


class SFT(OfflineMethod):
    """Maximize the log-likelihood of the trained tokens of examples."""

    name = "sft"
    title = "supervised fine-tuning"
    help = "Fine-tune a model on examples. The same command again resumes the run."

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.loss import sft_loss

        return sft_loss
