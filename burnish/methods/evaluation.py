"""Evaluation: measure a model on held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from burnish.config.constraints import model_problems, sampling_problems
from burnish.config.frozen_models import FrozenModel, reward_models
from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import BurnishError, UsageError
from burnish.method import Method

if TYPE_CHECKING:
    import torch

    from burnish.data.tasks import ItemSequence
    from burnish.distributed.layout import Layout
    from burnish.methods.offline import OfflineMethod
    from burnish.rewards.pool import RewardPool
    from burnish.runs.setup import TextFoundation
    from burnish.tracking.progress import Progress


class Evaluation(Method):
    """Score completions of held-out prompts, or without a reward the loss of held-out examples, of a reward model pairs of answers.

    Its configuration is usually that of a training run, so no setting counts as unread.
    """

    name = "eval"
    title = "evaluation"
    help = (
        "Measure a model on held-out data: the model of a configuration, the newest step of a run, "
        "or any model."
    )
    trains = False
    generates = True

    def settings(self, config: RunConfig) -> Section:
        """Return none: those of a configuration are of the method that trained with it."""
        return self.Settings()

    def run_name(self, config: RunConfig) -> str:
        """See `Method.run_name`. Results lie in the directory of the run that the configuration would train."""
        from burnish.methods.table import method_meant_by

        return method_meant_by(config).run_name(config)

    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """See `Method.problems`."""
        if config.rollout.engine == "openai":
            yield from _endpoint_problems(config)
        else:
            yield from model_problems(config.model)
        yield from sampling_problems(config)

    def longest(self, config: RunConfig) -> int:
        """See `Method.longest`. Without a reward, examples may be pairs of answers."""
        return super().longest(config) if config.scores else 2 * (config.data.max_length or 0)

    def with_tokens(self, config: RunConfig, tokens: int = 0) -> RunConfig:
        """See `Method.with_tokens`. What a training run recorded was for its devices."""
        if config.batch.is_auto:
            batch = config.batch.model_copy(update={"tokens_per_device": "auto"})
            config = config.model_copy(update={"batch": batch})
        return super().with_tokens(config, tokens)

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """See `Method.facts`."""
        from burnish.runs.summary import environment_rows, sampling_text

        if config.scores:
            samples = f"{config.evaluation.n} per prompt, {sampling_text(config.evaluation)}"
            yield "completions", samples
            yield from environment_rows(config.rollout.environment)
        else:
            yield (
                "measures",
                "loss per token of held-out examples (there are no reward.functions); of a reward model, pairs",
            )

    def dataset(
        self,
        foundation: TextFoundation,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: RewardPool | None = None,
    ) -> ItemSequence[Any]:
        """See `Method.dataset`."""
        from burnish.models.heads import has_value_head
        from burnish.runs.setup import Foundation, prompt_dataset

        if not foundation.config.scores:
            assert isinstance(foundation, Foundation)
            method = method_of_examples(judges=has_value_head(foundation.hf_config))
            return method.dataset(foundation, paths, setting, first=first, progress=progress)
        return prompt_dataset(foundation, paths, setting, first, pool, progress)

    def frozen(self, config: RunConfig) -> Iterator[FrozenModel]:
        """See `Method.frozen`."""
        yield from reward_models(config)

    def run(
        self, config: RunConfig, layout: Layout, device: torch.device, run_dir: Path | None = None
    ) -> Mapping[str, float]:
        """See `Method.run`."""
        from burnish.methods.parts.validation import evaluate

        return evaluate(config, layout, device, run_dir, self, method_of_examples)


def method_of_examples(*, judges: bool) -> OfflineMethod:
    """Return the method that measures held-out examples: of a model that `judges`, or of a language model."""
    from burnish.methods.reward_modeling import RewardModeling
    from burnish.methods.sft import SFT

    return RewardModeling() if judges else SFT()


def _endpoint_problems(config: RunConfig) -> Iterator[BurnishError]:
    """Yield why no endpoint can be asked for completions."""
    model = config.model
    url = config.rollout.url or ""
    try:
        parts = urlsplit(url)
        is_plain = parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        is_plain = False
    if url and not is_plain:
        yield UsageError(
            "rollout.url is not the address of an endpoint",
            have=f"rollout.url: {url}",
            want="http://HOST:PORT/PATH, with a port from 1 to 65535",
            do="correct rollout.url; a key is the environment variable OPENAI_API_KEY",
        )
    if not model.tokenizer and not model.path:
        yield UsageError(
            "an endpoint's completions are counted in tokens, and there is no tokenizer",
            have="neither model.tokenizer nor model.path",
            want="the tokenizer of the endpoint's model, or any other",
            do="set model.tokenizer",
        )
