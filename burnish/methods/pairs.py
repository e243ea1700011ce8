"""What methods share that learn from pairs of answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from burnish.config.preferences import PairSettings
from burnish.config.schema import DataConfig, RunConfig
from burnish.errors import count_text
from burnish.methods.offline import OfflineMethod

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.data.preferences import PreferenceDataset
    from burnish.data.steps import StepDataset
    from burnish.data.tasks import ItemSequence
    from burnish.methods.parts.offline_training import Models
    from burnish.plan.model import Workload
    from burnish.records import Batch, MicroBatch, TokenOutputs
    from burnish.runs.setup import Foundation
    from burnish.tracking.progress import Progress
    from burnish.tracking.stats import Stats


class PairMethod(OfflineMethod):
    """Train on `batch.examples` pairs of answers a step."""

    Settings: ClassVar[type[PairSettings]] = PairSettings
    is_judged: ClassVar[bool] = False
    """Whether an answer is judged as a whole, with its prompt; otherwise its tokens are trained on."""

    def terms(self, config: RunConfig, micro: MicroBatch) -> int:
        """Return how many terms the loss of the global batch has: by default pairs."""
        return micro.num_sequences // 2

    def longest(self, config: RunConfig) -> int:
        """See `Method.longest`: of two answers."""
        return 2 * super().longest(config)

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        yield "step", count_text(config.batch.examples, "pair")

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        from burnish.plan.model import Workload

        work = Workload.of_examples(config.batch, config.data)
        has_reference = self.keeps_start(config)
        scorings = int(has_reference)
        return replace(
            work, sequences=2 * work.sequences, scorings=scorings, has_reference=has_reference
        )

    def prompt_of(self, rows: Any, config: DataConfig) -> Any:
        """See `Method.prompt_of`."""
        from burnish.data.columns import prompt_at
        from burnish.data.preference_columns import answer_columns, preference_prompt_column

        answers = answer_columns(config, rows, self.Settings())
        column = preference_prompt_column(config, rows, answers)
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
    ) -> PreferenceDataset | StepDataset:
        """See `Method.dataset`."""
        from burnish.runs.preference_setup import preference_dataset

        settings = self.settings(foundation.config)
        return preference_dataset(
            foundation, paths, setting, settings, first, progress, is_judged=self.is_judged
        )

    def subsets(self, items: ItemSequence[Any], rows: Sequence[int]) -> list[str]:
        """See `OfflineMethod.subsets`: the column `subset`, as RewardBench has it."""
        from burnish.data.preferences import PreferenceDataset

        return items.subsets(rows) if isinstance(items, PreferenceDataset) else [""] * len(rows)

    @abstractmethod
    def rewards(self, config: RunConfig) -> Callable[[TokenOutputs, MicroBatch], Tensor] | None:
        """Return a function that returns the reward of each sequence of a micro-batch, [S]; None if answers are not compared."""

    def measure(self, models: Models, batch: Batch) -> Stats:
        """Return the loss and the statistics of held-out pairs. Collective."""
        return self.judged(models, batch)[0]

    def judged(self, models: Models, batch: Batch) -> tuple[Stats, dict[int, float]]:
        """See `OfflineMethod.judged`."""
        from burnish.tracking.stats import Mean, Stats

        batch, prepared = self.prepare(models, batch)
        loss = self.loss(models.foundation.config)
        rewards = self.rewards(models.foundation.config)
        by_number: dict[int, float] = {}
        stats = Stats({"loss": Mean(0.0, 0.0), **prepared})
        parts = zip(models.policy.forward(batch), batch.microbatches, batch.examples, strict=True)
        for outputs, micro, numbers in parts:
            micro = micro.to(models.foundation.device)
            part, own = loss(outputs, micro)
            if rewards is not None:
                values = rewards(outputs, micro).tolist()
                by_number |= {n: x for n, x in zip(numbers, values, strict=True) if n >= 0}
            whole = self.terms(models.foundation.config, micro)
            count = cast(Mean, own["accuracy"]).count
            own["loss"] = Mean(part.detach() * whole, count)
            stats = stats.merge(own)
        return stats, by_number
