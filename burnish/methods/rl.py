"""Reinforcement learning with verifiable rewards: GRPO, its variants, and PPO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from burnish.config.constraints import (
    formula_notices,
    model_problems,
    reward_problems,
    rollout_problems,
    training_problems,
)
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError
from burnish.files.hub import is_elsewhere
from burnish.method import Method

if TYPE_CHECKING:
    import torch

    from burnish.config.frozen_models import FrozenModel
    from burnish.data.tasks import PromptDataset
    from burnish.distributed.layout import Layout
    from burnish.engines.base import LossFn
    from burnish.plan.model import Workload
    from burnish.records import Batch
    from burnish.records.rollout_table import RolloutTable
    from burnish.rewards.pool import RewardPool
    from burnish.runs.frozen_engines import LoadedModel
    from burnish.runs.setup import Foundation, TextFoundation
    from burnish.tracking.progress import Progress


class RL(Method):
    """Draw completions, score them, and raise the probability of the better ones."""

    name = "rl"
    title = "reinforcement learning"
    help = "Train a model by reinforcement learning. The same command again resumes the run."
    generates = True
    unread: ClassVar[Sequence[str]] = (
        "batch.examples",
        "data.completion_column",
        "data.text_column",
        "data.max_length",
    )
    card: ClassVar[Sequence[str]] = (
        "algorithm.advantage",
        "algorithm.policy_loss",
        "algorithm.kl.coef",
        "rollout.n",
        "rollout.temperature",
        "rollout.max_response_length",
        "batch.prompts",
        "batch.minibatches",
        "batch.epochs",
    )

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from model_problems(config.model)
        yield from training_problems(config, config.critic.warmup_steps)
        yield from reward_problems(config)
        if config.distill.teachers:
            from burnish.config.teacher_problems import teacher_problems

            yield from teacher_problems(config, is_drawn=True)

    def size_problems(self, config: RunConfig, shares: int) -> Iterator[BurnishError]:
        """See `Method.size_problems`."""
        yield from rollout_problems(config, shares)

    def notices(self, config: RunConfig) -> Iterator[str]:
        """See `Method.notices`."""
        yield from super().notices(config)
        yield from formula_notices(config)

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        from burnish.runs.summary import formula_rows, sampling_rows

        yield from sampling_rows(config.batch, config.rollout, config.data.max_prompt_length)
        talks = config.rollout.environment.target is not None
        parts = (config.algorithm, config.critic, config.reward)
        yield from formula_rows(*parts, has_environment=talks)
        if config.distill.teachers:
            yield "teacher", str(config.distill)

    def rows_per_step(self, config: RunConfig) -> int:
        """See `Method.rows_per_step`."""
        return config.batch.prompts

    def stays_in_epoch(self, config: RunConfig) -> bool:
        """See `Method.stays_in_epoch`. Dynamic sampling takes as many rows as it needs."""
        return config.steps is None and not config.algorithm.dynamic_sampling.enabled

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        from burnish.plan.model import Workload

        parts = (config.batch, config.data, config.rollout, config.algorithm)
        work = Workload.of_completions(*parts).taught(config.distill)
        return work.with_critic(config.critic.lora_rank)

    def dry_runs(self, config: RunConfig) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs`."""
        from burnish.algorithms.base import load_advantage, load_policy_loss

        yield partial(load_policy_loss, config.algorithm)
        yield partial(load_advantage, config.algorithm.advantage)

    def frozen(self, config: RunConfig) -> Iterator[FrozenModel]:
        """See `Method.frozen`."""
        if config.critic.path or config.reward.models or config.distill.teachers:
            from burnish.config.frozen_models import of_sections

            has_critic = config.algorithm.advantage.name == "gae"
            yield from (e for e in of_sections(config) if has_critic or e.role != "critic")

    def dry_runs_of_models(self, foundation: Foundation) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs_of_models`."""
        from burnish.methods.parts.critic import critic_foundation

        path = foundation.config.critic.path
        if foundation.config.algorithm.advantage.name == "gae" and not (
            path and is_elsewhere(path)
        ):
            yield partial(critic_foundation, foundation)
        if foundation.config.distill.teachers:
            from burnish.methods.parts.distillation import dry_runs_of_teachers

            yield from dry_runs_of_teachers(foundation)

    def dataset(
        self,
        foundation: TextFoundation,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: RewardPool | None = None,
    ) -> PromptDataset:
        """See `Method.dataset`."""
        from burnish.runs.setup import prompt_dataset

        return prompt_dataset(foundation, paths, setting, first, pool, progress)

    # A step.

    in_pairs: ClassVar[bool] = False
    """Whether `select` leaves two rollouts of a prompt, a pair that shares a micro-batch, the better one first."""

    def keeps_start(self, config: RunConfig) -> bool:
        """Return whether the loss needs `ref_logprobs`, those of the model that training starts from."""
        return False

    def select(self, config: RunConfig, groups: RolloutTable) -> RolloutTable:
        """Return a step's rollouts, with the reward NaN where the update shall not learn from one.

        Every rank has the rewards of all rollouts, and must choose the same.
        """
        return groups

    def prepare(self, config: RunConfig, batch: Batch, beside: Mapping[str, LoadedModel]) -> Batch:
        """Complete a batch before its update; `beside` has the models of `frozen` by setting. Collective."""
        return batch

    def dry_runs_of_rows(self, foundation: Foundation) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs_of_rows`."""
        if foundation.config.distill.teachers:
            from burnish.methods.parts.distillation import require_sources

            yield partial(require_sources, foundation)

    def loss(self, config: RunConfig) -> LossFn:
        """Return the loss of a micro-batch."""
        from burnish.algorithms.loss import policy_loss_fn

        loss = policy_loss_fn(config.algorithm, config.rollout.max_response_length)
        if config.distill.teachers:
            from burnish.algorithms import distillation

            weight = config.distill.weight
            if config.distill.tokens == "sampled":
                return distillation.sampled_distillation(loss, weight)
            how = (config.algorithm.aggregation, config.rollout.max_response_length)
            return distillation.vocabulary_distillation(loss, weight, 1.0, *how)
        return loss

    def run(
        self, config: RunConfig, layout: Layout, device: torch.device, run_dir: Path | None = None
    ) -> Mapping[str, float]:
        """See `Method.run`."""
        from burnish.methods.parts.online_training import train

        train(self, config, layout, device)
        return {}
