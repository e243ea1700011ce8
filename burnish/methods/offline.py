"""Methods that train on fixed rows: fine-tuning, and what learns from fixed examples in another way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from burnish.config.constraints import (
    batch_problems,
    example_problems,
    model_problems,
    training_problems,
)
from burnish.config.schema import DataConfig, RunConfig
from burnish.errors import BurnishError, UsageError, count_text
from burnish.method import Method

if TYPE_CHECKING:
    import torch

    from burnish.data.tasks import ItemSequence
    from burnish.distributed.layout import Layout
    from burnish.engines.base import LossFn
    from burnish.methods.parts.offline_training import Models
    from burnish.plan.model import Workload
    from burnish.records import Batch
    from burnish.runs.session import Session
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress
    from burnish.tracking.stats import Stats


class OfflineMethod(Method):
    """Train on `batch.examples` rows of `data.train` a step, each row one sequence or several that share a micro-batch.

    A step reads rows (`dataset`), completes the batch (`prepare`) and takes one optimizer step on `loss`.
    """

    trains_mtp: ClassVar[bool] = False
    """Whether its loss of a token is also right for the predictions of layers for multi-token prediction (`model.train_mtp`)."""
    unread: ClassVar[Sequence[str]] = (
        "rollout",
        "reward",
        "algorithm",
        "critic",
        "distill",
        "batch.prompts",
        "batch.minibatches",
        "batch.epochs",
        "data.answer_column",
        "data.max_prompt_length",
        "evaluation.n",
        "evaluation.solved",
        "evaluation.temperature",
        "evaluation.top_k",
        "evaluation.top_p",
        "evaluation.min_p",
    )
    card: ClassVar[Sequence[str]] = ("batch.examples",)

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from model_problems(config.model)
        yield from training_problems(config)
        yield from example_problems(config)
        if config.model.train_mtp and not self.trains_mtp:
            yield UsageError(
                f"burnish {' '.join(self.command)} does not train layers for multi-token prediction",
                have="model.train_mtp: true",
                want="a method whose loss is the negative log-likelihood of tokens, as burnish sft",
                do="remove model.train_mtp: every step then has these layers as they were",
            )

    def size_problems(self, config: RunConfig, shares: int) -> Iterator[BurnishError]:
        """See `Method.size_problems`."""
        yield from batch_problems(config, shares)

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        yield "step", count_text(config.batch.examples, "example")

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        from burnish.plan.model import Workload

        return Workload.of_examples(config.batch, config.data)

    # A step.

    def keeps_start(self, config: RunConfig) -> bool:
        """Return whether the model that training starts from is kept, frozen, beside the one that is trained."""
        return False

    def foundation(self, foundation: Foundation) -> Foundation:
        """Return what is trained, given the language model's foundation: by default that itself. Collective."""
        return foundation

    def prompt_of(self, rows: Any, config: DataConfig) -> Any:
        """See `Method.prompt_of`."""
        from burnish.data.columns import example_format, prompt_at

        kind, columns = example_format(config, rows)
        return prompt_at(rows[0], columns[0]) if kind == "pair" else None

    def dataset(
        self,
        foundation: Foundation,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: Any = None,
    ) -> ItemSequence[Any]:
        """See `Method.dataset`. Item i is an `Example`, or a tuple of examples that share a micro-batch, in this order."""
        from burnish.runs.setup import example_dataset

        return example_dataset(foundation, paths, setting, first, progress)

    def before_training(
        self,
        items: ItemSequence[Any],
        rows: Sequence[int] | None,
        foundation: Foundation,
        session: Session,
    ) -> ItemSequence[Any]:
        """Return a data set with what is computed once, before training. `rows` are the items that will be read; None: all. Collective."""
        return items

    def batch(
        self, dataset: ItemSequence[Any], rows: Sequence[int], models: Foundation, layout: Layout
    ) -> Batch:
        """Return items of the data set, packed. Those examples that an item holds share a micro-batch."""
        from burnish.methods.parts.offline_training import batch_of

        return batch_of(dataset.items(rows), models, layout)

    def prepare(self, models: Models, batch: Batch) -> tuple[Batch, Stats]:
        """Complete a batch before its update, and return it with this rank's part of statistics. Collective."""
        from burnish.tracking.stats import Stats

        return batch, Stats({})

    def subsets(self, items: ItemSequence[Any], rows: Sequence[int]) -> list[str]:
        """Return the subset of each held-out item, which is measured by itself too; "" for none."""
        return [""] * len(rows)

    def measure(self, models: Models, batch: Batch) -> Stats:
        """Return this rank's part of the statistics of held-out examples. Collective."""
        from burnish.methods.parts.validation import negative_log_likelihood

        return negative_log_likelihood(models.policy, batch)

    def judged(self, models: Models, batch: Batch) -> tuple[Stats, dict[int, float]]:
        """Return what `measure` does and, of examples that compare, this rank's rewards by number. Collective."""
        return self.measure(models, batch), {}

    @abstractmethod
    def loss(self, config: RunConfig) -> LossFn:
        """Return the loss of a micro-batch."""

    def run(
        self, config: RunConfig, layout: Layout, device: torch.device, run_dir: Path | None = None
    ) -> Mapping[str, float]:
        """See `Method.run`."""
        from burnish.methods.parts.offline_training import train

        train(self, config, layout, device)
        return {}
