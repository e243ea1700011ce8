"""Online preference optimization: pairs of the model's own completions, ranked by their rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from burnish.config.preferences import OnlineSettings
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError
from burnish.extend import PREFERENCE_LOSSES
from burnish.methods.best_of_n import BestOfN
from burnish.methods.dpo import loss_problems, loss_text

if TYPE_CHECKING:
    from burnish.engines.base import LossFn
    from burnish.plan.model import Workload
    from burnish.records.rollout_table import RolloutTable


class OnlineDPO(BestOfN):
    """Prefer the best completion of each prompt to the worst (online DPO, arXiv 2402.04792)."""

    name = "online-dpo"
    title = "online preference optimization"
    help = "Draw completions, and prefer the best of each prompt to the worst. The same command again resumes the run."
    Settings = OnlineSettings
    in_pairs = True
    card = ("rollout.n", "method.loss", "method.beta", "batch.prompts")

    def keeps_start(self, config: RunConfig) -> bool:
        """See `RL.keeps_start`."""
        return bool(self.settings(config).reference == "initial")

    def longest(self, config: RunConfig) -> int:
        """See `Method.longest`: of a pair."""
        return 2 * super().longest(config)

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from super().problems(config)
        settings = self.settings(config)
        yield from loss_problems(settings.loss, PREFERENCE_LOSSES, settings.reference)
        if config.rollout.n < 2:
            yield UsageError(
                "a pair needs two completions of a prompt",
                have=f"rollout.n: {config.rollout.n}",
                want="at least 2",
                do="set rollout.n=2 or more",
            )
        longest = 2 * ((config.data.max_prompt_length or 0) + config.rollout.max_response_length)
        if not config.batch.is_auto and longest > config.microbatch_tokens:
            yield UsageError(
                "the two completions of a pair share a micro-batch, and may not fit into it",
                have=f"up to {longest} tokens with their prompts",
                want=f"at most {config.microbatch_tokens} tokens (batch.tokens_per_device, engine.sequence_parallel)",
                do=f"set batch.tokens_per_device={longest}, or shorten prompts or completions",
            )
        if config.rollout.environment.target:
            yield UsageError(
                "online preference optimization compares completions, and no conversations",
                have="rollout.environment",
                want="prompts and rewards",
                do="remove rollout.environment, or start burnish rl or burnish rejection-sampling",
            )

    def functions(self, config: RunConfig) -> Sequence[str]:
        """See `Method.functions`."""
        return [name for name in self.settings(config).loss if ":" in name]

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        yield from super().facts(config)
        yield "loss", loss_text(self.settings(config))

    def workload(self, config: RunConfig) -> Workload:
        """See `Method.workload`."""
        has_reference = self.keeps_start(config)
        work = super().workload(config)
        return replace(work, scorings=work.scorings + has_reference, has_reference=has_reference)

    def dry_runs(self, config: RunConfig) -> Iterator[Callable[[], object]]:
        """See `Method.dry_runs`."""
        yield from super().dry_runs(config)
        yield partial(self.loss, config)

    def select(self, config: RunConfig, groups: RolloutTable) -> RolloutTable:
        """Keep the best and the worst completion of each prompt, unless their rewards are equal."""
        import numpy as np

        usable = groups.is_scored & (groups.lengths > 0)
        if config.algorithm.mask_truncated:
            usable &= groups.by_kind(lambda kind: kind.stop_reason != "length") > 0
        numbers = np.flatnonzero(usable)
        order = numbers[np.lexsort((groups.rewards[numbers], groups.groups[numbers]))]
        _, starts, counts = np.unique(groups.groups[order], return_index=True, return_counts=True)
        pairs = np.stack([order[starts], order[starts + counts - 1]])
        lowest, highest = groups.rewards[pairs]
        chosen = pairs[:, highest > lowest].ravel()
        rewards = np.full(len(groups.rewards), np.nan)
        rewards[chosen] = groups.rewards[chosen]
        return groups.with_rewards(rewards)

    def loss(self, config: RunConfig) -> LossFn:
        """See `RL.loss`."""
        from burnish.algorithms.preferences import pair_loss

        return pair_loss(self.settings(config))
