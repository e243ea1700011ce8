"""Find the reward function that a configuration names, and see how it wants to be called.

Two signatures are in common use, told apart by their parameters' names:

- TRL's: `(prompts, completions, completion_ids, **columns) -> list[float | None]`, all rollouts in one call
- verl's: `(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}`, one at a time

A function gets, by keyword, those of these that it names, and all of them when it takes `**kwargs`.
Sync or async. Left out: calling it (`burnish.rewards.call`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from burnish.errors import UsageError

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


def load_function(name: str) -> Callable[..., Any]:
    """The function named `module:function`, `path/to/file.py:function`, or like a built-in.

    Raises `UsageError`, with the nearest name, when the module, the file or the function is not
    there, cannot be imported or is not callable.
    """
    module_name, colon, function_name = BUILTINS.get(name, name).rpartition(":")
    if not colon or not module_name or not function_name:
        raise UsageError(
            f"{name!r} names no reward function.",
            have=name,
            want=f"module:function, file.py:function or one of {', '.join(BUILTINS)}",
            do=_nearest(name, BUILTINS),
        )
    from_file = module_name.endswith(".py")
    module = _import_file(module_name) if from_file else _import_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"The reward function {name!r} is not there.",
            have=f"{module_name} without {function_name!r}",
            do=_nearest(function_name, names),
        )
    if not callable(function):
        raise UsageError(
            f"The reward function {name!r} cannot be called.",
            have=f"{function_name} is {type(function).__name__}",
            want="a function",
            do="name a function of that module",
        )
    return function  # type: ignore[no-any-return]


def read_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Signature:
    """How `function`, called with `kwargs` besides, wants to be called.

    Raises `UsageError` when it fits neither TRL's signature nor verl's, or does not take `kwargs`.
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
            do=_nearest(key, named - TRL_ARGUMENTS - VERL_ARGUMENTS),
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


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from error
        known = [module.name for module in pkgutil.iter_modules()]
        raise UsageError(
            f"The module {name!r} of a reward function is not there.",
            have=f"no module {error.name!r} in the working directory or installed",
            do=_nearest(error.name, known) or "give the file instead: path/to/file.py:function",
        ) from error
    except Exception as error:
        raise _broken(name, error) from error


def _import_file(name: str) -> ModuleType:
    path = Path(name).expanduser()
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")]
        raise UsageError(
            f"The file {name!r} of a reward function is not there.",
            have=f"no such file in {path.parent.absolute()}",
            do=_nearest(path.name, siblings),
        )
    module_name = f"burnish_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"The file {name!r} of a reward function is not a Python source file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _broken(name, error) from error
    return module


def _broken(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"{name!r}, which holds a reward function, cannot be imported.",
        have=f"{type(error).__name__}: {error}",
        do=f"make `python -c 'import ...'` of it work with {sys.executable}",
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


def _nearest(name: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]!r}?" if close else None
