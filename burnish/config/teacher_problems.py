"""Check the settings of distillation against each other and the others."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError


def teacher_problems(config: RunConfig) -> Iterator[BurnishError]:
    """Yield why a model cannot learn from its teachers."""
    sources = [teacher.source for teacher in config.distill.teachers]
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
        if is_set and not config.has_rewards:
            yield UsageError(
                f"{name} chooses rows by their rewards, and teachers give none",
                have="reward.functions: []",
                want="a reward function, a reward model or an environment",
                do=f"set reward.functions, or remove {name}",
            )
