"""Train a part of a model: the weights whose names match the patterns of `model.train`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from transformers import PretrainedConfig, PreTrainedModel

from burnish.errors import IncompatibleError, few, refusing
from burnish.functions import did_you_mean
from burnish.models.meta_init import build_on_meta
from burnish.models.names import regions, tied_names


def matching(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names in which a regular expression is found. Raises an error for one that is wrong, or is found in none."""
    chosen = set[str]()
    for pattern in patterns:
        with refusing(
            f"model.train has a pattern that is no regular expression: {pattern}",
            want="a regular expression that is found in names of weights",
            do="correct model.train",
        ):
            own = {name for name in names if re.search(pattern, name)}
        if not own:
            parts = {part for name in names for part in name.split(".") if not part.isdigit()}
            words = re.findall(r"\w*[A-Za-z]\w*", pattern)
            near = (did_you_mean(word, parts) for word in words if word not in parts)
            raise IncompatibleError(
                f"model.train: no weight has a name with {pattern}",
                have=few(sorted(names)),
                want="patterns that are found in names of weights",
                do=next(filter(None, near), None) or "correct model.train",
            )
        chosen |= own
    return chosen


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Let no gradients flow into the parameters whose names in a checkpoint match no pattern.

    A tied weight has several names. Raises an error as `matching` does, and for a pattern that divides a parameter.
    """
    others = tied_names(model)
    known = [(region.name, region.parameter) for region in regions(model)]
    known += others.items()
    chosen = matching([name for name, _ in known], patterns)
    trained = {parameter for name, parameter in known if name in chosen}
    tied = set(others.values())
    for name, parameter in known:
        if parameter in trained - tied and name not in chosen:
            raise IncompatibleError(
                "model.train divides weights that are one parameter in memory",
                have=f"a pattern for a part of {parameter}, and none for {name}",
                want="patterns for all of them or none",
                do=f"add {name} to model.train",
            )
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)


def count_unfrozen(hf_config: PretrainedConfig, patterns: Sequence[str]) -> int:
    """Return how many numbers are trained. Raises an error as `freeze` does."""
    model = build_on_meta(hf_config)
    freeze(model, patterns)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
