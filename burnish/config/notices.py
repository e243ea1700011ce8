"""Remarks on a sound configuration, one line each, at the start and in a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from burnish.config.check import Command
from burnish.config.schema import RunConfig
from burnish.config.section import Section

_UNUSED: Mapping[Command, Sequence[str]] = {
    "sft": (
        "rollout",
        "reward",
        "algorithm",
        "critic",
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
    ),
    "rl": ("batch.examples", "data.completion_column", "data.text_column", "data.max_length"),
    "eval": (),  # of a file that is another command's
}
"""Sections and settings that a command does not look at."""
_WIDE_CLIP = 0.1
"""A clip range for the ratios of tokens; those of whole sequences, means of many, hardly ever leave it."""


def notices(config: RunConfig, command: Command) -> Iterator[str]:
    """What to say of `command` with this configuration."""
    yield from _of_unused(config, command)
    if command != "eval":
        yield from _of_validation(config)
    if command == "rl" and config.algorithm.policy_loss == "gspo":
        yield from _of_gspo(config)
    if command == "rl" and config.algorithm.policy_loss == "cispo":
        yield from _of_cispo(config)


def _of_unused(config: RunConfig, command: Command) -> Iterator[str]:
    if found := [name for name in _UNUSED[command] if _is_set(config, name)]:
        yield f"set, and not used by burnish {command}: {', '.join(found)}"


def _is_set(config: RunConfig, name: str) -> bool:
    """Whether a section, or a setting, is other than by default."""
    value: Section = config
    *sections, last = name.split(".")
    for section in sections:
        value = getattr(value, section)
    return last in value.model_dump(include={last}, exclude_defaults=True)


def _of_validation(config: RunConfig) -> Iterator[str]:
    if config.data.validation and not config.evaluation.every:
        when = "before the first step only" if config.evaluation.before else "never"
        yield f"data.validation is measured {when}; evaluation.every=N does it every N steps and after the last"


def _of_gspo(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.aggregation != "sequence_mean":
        yield (
            "algorithm.policy_loss gspo is its paper's objective with algorithm.aggregation sequence_mean; "
            f"here it is {algorithm.aggregation}"
        )
    if min(algorithm.clip_low, algorithm.clip_high) >= _WIDE_CLIP:
        yield (
            f"algorithm.policy_loss gspo with clip_low {algorithm.clip_low:g} and clip_high {algorithm.clip_high:g} "
            "clips next to nothing; its paper has 3e-4 and 4e-4"
        )


def _of_cispo(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.aggregation != "token_mean":
        yield (
            "algorithm.policy_loss cispo is its paper's objective with algorithm.aggregation token_mean; "
            f"here it is {algorithm.aggregation}"
        )
    if algorithm.clip_low < 1:
        yield (
            f"algorithm.policy_loss cispo with clip_low {algorithm.clip_low:g} holds weights at {1 - algorithm.clip_low:g} or more; "
            "its paper leaves the lower side open, as clip_low 1 does"
        )
