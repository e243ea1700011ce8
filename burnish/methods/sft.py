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
    lr = 1e-5
    # As QLoRA (arXiv 2305.14314), and recipes of TRL, axolotl and Unsloth.
    lora_lr = 2e-4

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.loss import sft_loss

        return sft_loss
