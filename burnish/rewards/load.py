"""Read a reward function's signature.

Two signatures are told apart by their parameters' names:

- TRL's: `(prompts, completions, completion_ids, **columns) -> list[float | None]`, all rollouts in one call
- verl's: `(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}`, one at a time

A function gets the ones that it names, by keyword, and all of them with `**kwargs`. Sync or async.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from burnish.errors import UsageError
from burnish.functions import did_you_mean

Style = Literal["trl", "verl"]
"""Whose signature a function has."""

BUILTINS: Mapping[str, str] = {
    "exact_match": "burnish.rewards.builtin:exact_match",
    "numeric": "burnish.rewards.builtin:numeric",
    "regex": "burnish.rewards.builtin:regex",
    "math_verify": "burnish.rewards.symbolic:math_verify",
}
"""The built-in functions by name."""

TRL_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""What a TRL function can ask for besides the data's columns."""
VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
"""What a verl function can ask for."""


@dataclass(frozen=True, slots=True)
class Signature:
    """How a reward function wants to be called."""

    style: Style
    """One call for all rollouts (trl), or one for each (verl)."""
    accepts: frozenset[str] | None
    """The keywords it takes; None: any."""
    columns: frozenset[str]
    """Columns of the data that it cannot be called without."""
    is_async: bool = False
    """Whether it is declared with `async def`, so that its calls can wait beside each other."""


def read_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return how to call `function` with `kwargs`.

    Raises `UsageError` if it fits neither TRL's signature nor verl's, or does not take `kwargs`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The reward function {name!r} has no signature: {error}",
            do="wrap it in a Python function with named parameters",
        ) from error
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = frozenset(p.name for p in by_keyword)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    } - kwargs.keys()
    positional = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    trl, verl = "completions" in named, "solution_str" in named
    unmet = required - VERL_ARGUMENTS if verl else set()
    if trl == verl or positional or unmet:
        raise UsageError(
            f"The reward function {name!r} fits no known signature.",
            have=f"{getattr(function, '__name__', name)}{inspect.signature(function)}",
            want="TRL's (prompts, completions, **columns) or verl's (data_source, solution_str, ground_truth, extra_info)",
            do=f"give {', '.join(sorted(unmet))} in its kwargs"
            if unmet
            else "name its parameters like that",
        )
    for key in () if anything else sorted(kwargs.keys() - named):
        raise UsageError(
            f"The reward function {name!r} takes no argument {key!r}.",
            have=f"reward.functions kwargs {sorted(kwargs)}",
            do=did_you_mean(key, named - TRL_ARGUMENTS - VERL_ARGUMENTS),
        )
    if BUILTINS.get(name) == BUILTINS["regex"]:
        _check_pattern(kwargs["pattern"])
    columns = frozenset(required - TRL_ARGUMENTS) if trl else frozenset[str]()
    declared = (function, type(function).__call__)  # an instance is what its class is
    return Signature(
        style="trl" if trl else "verl",
        accepts=None if anything else named,
        columns=columns,
        is_async=any(map(inspect.iscoroutinefunction, declared)),
    )


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UsageError(
            "The reward regex was given a pattern that is not a regular expression.",
            have=f"{pattern!r}: {error}",
            do="correct pattern in the function's kwargs",
        ) from error
