"""Supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import BurnishError
from burnish.extend import FINE_TUNING_LOSSES
from burnish.functions import no_function
from burnish.methods.offline import OfflineMethod

if TYPE_CHECKING:
    from burnish.data.examples import ExampleDataset
    from burnish.engines.base import LossFn
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress


class FineTuningSettings(Section):
    """How a model learns from examples: `burnish sft`."""

    loss: str = "nll"
    """The loss of a token: nll, its negative log-likelihood; dft, the same times the token's probability (arXiv 2508.05629), so that unlikely tokens weigh less; or file.py:function."""
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
    Settings = FineTuningSettings

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

    def loss(self, config: RunConfig) -> LossFn:
        """See `OfflineMethod.loss`."""
        from burnish.algorithms.fine_tuning import sft_loss

        return sft_loss(self.settings(config).loss)
