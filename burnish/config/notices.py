"""What a user may want to know of a configuration that is sound: one line each, said at the start and by a dry run.

Left out: what is wrong (`burnish.config.check`).
"""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.check import Command
from burnish.config.schema import RunConfig

_WIDE_CLIP = 0.1
"""A clip range for the ratios of tokens; those of whole sequences, means of many, hardly ever leave it."""


def notices(config: RunConfig, command: Command) -> Iterator[str]:
    """What to say of `command` with this configuration."""
    if command != "eval":
        yield from _of_validation(config)
    if command == "rl" and config.algorithm.policy_loss == "gspo":
        yield from _of_gspo(config)


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
