"""What methods share that learn from a choice of each prompt's completions, by their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError
from burnish.methods.rl import RL


class BestOfN(RL):
    """Draw completions, and learn from those that `select` chooses, by a loss without advantages."""

    unread: ClassVar[Sequence[str]] = (
        *RL.unread,
        "critic",
        *(
            f"algorithm.{name}"
            for name in (
                "advantage", "policy_loss", "clip_low", "clip_high", "top_entropy", "aggregation", "entropy_coef", "old_logprobs",
                "mismatch_cap", "mismatch_level", "mismatch_reject", "mismatch_low", "mismatch_high",
            )
        ),
    )  # fmt: skip

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        yield from super().problems(config)
        algorithm = config.algorithm
        if algorithm.advantage.name == "gae":
            yield UsageError(
                f"burnish {self.name} has no critic",
                have="algorithm.advantage: gae",
                want="no advantage",
                do="remove algorithm.advantage",
            )
        if config.distill.teachers:
            yield UsageError(
                f"burnish {self.name} has no teachers",
                have="distill.teachers",
                want="rewards alone",
                do="remove distill, or start burnish rl",
            )
        if algorithm.kl.coef:
            yield UsageError(
                f"burnish {self.name} has no KL term",
                have=f"algorithm.kl.coef: {algorithm.kl.coef}",
                want="0",
                do="remove algorithm.kl; method.beta of burnish online-dpo keeps the model near its start",
            )

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        from burnish.runs.summary import sampling_rows

        yield from sampling_rows(config.batch, config.rollout, config.data.max_prompt_length)
