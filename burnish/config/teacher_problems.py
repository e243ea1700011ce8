"""Check the settings of distillation against each other and the others."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError


def teacher_problems(config: RunConfig, *, is_drawn: bool) -> Iterator[BurnishError]:
    """Yield why a model cannot learn from its teachers. `is_drawn`: whether it answers itself."""
    distill = config.distill
    sources = [teacher.source for teacher in distill.teachers]
    reads_own = any(teacher.prompt_column is not None for teacher in distill.teachers)
    if reads_own and (config.data.streaming or config.rollout.environment.target is not None):
        yield UsageError(
            "a teacher reads prompts of its own only of rows in memory, without an environment",
            have="distill.teachers[].prompt_column, and data.streaming or rollout.environment",
            want="one or the other",
            do="remove prompt_column, or data.streaming and rollout.environment",
        )
    if any(teacher.url is not None for teacher in distill.teachers):
        yield from _of_endpoints(config)
    if not is_drawn:
        yield from _of_examples(config)
    if distill.tokens == "all" and len(sources) > 1:
        yield UsageError(
            "distill.tokens all compares with the output layer of one teacher",
            have=f"{len(sources)} teachers",
            want="one teacher, or their most probable tokens",
            do="set distill.tokens=topk",
        )
    if distill.tokens != "sampled" and config.engine.kind == "megatron":
        yield UsageError(
            "the megatron engine does not compare vocabularies",
            have=f"distill.tokens: {distill.tokens}",
            want="sampled, or engine.kind: torch",
            do="set distill.tokens=sampled in burnish rl, or engine.kind=torch",
        )
    if len({*sources}) < len(sources):
        yield UsageError(
            "two teachers of distill.teachers teach the same rows",
            have=f"sources {', '.join(map(str, sources))}",
            want="a source for each teacher but one, and no source twice",
            do="set distill.teachers[].source to the values of the column data_source",
        )
    varying = {
        "algorithm.dynamic_sampling.enabled": config.algorithm.dynamic_sampling.enabled,
        "data.curriculum": config.data.curriculum == "measured",
    }
    for name, is_set in varying.items():
        if is_drawn and is_set and not config.has_rewards:
            yield UsageError(
                f"{name} chooses rows by their rewards, and teachers give none",
                have="reward.functions: []",
                want="a reward function, a reward model or an environment",
                do=f"set reward.functions, or remove {name}",
            )


def _of_endpoints(config: RunConfig) -> Iterator[BurnishError]:
    if config.distill.tokens != "sampled":
        yield UsageError(
            "a teacher at an endpoint scores the tokens that the student drew, and no others",
            have=f"distill.teachers[].url, distill.tokens: {config.distill.tokens}",
            want="sampled, in burnish rl",
            do="set distill.tokens=sampled, or distill.teachers[].path to the teacher's weights",
        )
    if config.rollout.temperature != 1:
        yield UsageError(
            "a teacher at an endpoint scores at temperature 1, and the student would be compared at another",
            have=f"distill.teachers[].url, rollout.temperature: {config.rollout.temperature:g}",
            want="rollout.temperature: 1",
            do="set rollout.temperature=1, or distill.teachers[].path to the teacher's weights",
        )


def _of_examples(config: RunConfig) -> Iterator[BurnishError]:
    distill = config.distill
    if distill.tokens == "sampled":
        yield UsageError(
            "a teacher of fixed answers has to be compared at more tokens than those that stand there",
            have="distill.tokens: sampled, which is for tokens that the student drew",
            want="topk or all",
            do="set distill.tokens=all, or start burnish rl, where the student answers",
        )
    if any(teacher.prompt_column is not None for teacher in distill.teachers):
        yield UsageError(
            "a teacher with a prompt of its own needs completions that the student draws",
            have="distill.teachers[].prompt_column",
            want="teachers that read the student's prompt",
            do="remove prompt_column, or start burnish rl",
        )
    if distill.weight > 1:
        yield UsageError(
            "distill.weight is the share of the teacher in the loss of fixed answers",
            have=f"distill.weight: {distill.weight:g}",
            want="at most 1",
            do="lower distill.weight",
        )
