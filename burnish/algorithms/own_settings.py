"""Call a formula's function, a built-in or a user's, with the settings that stand beside its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from burnish.config.algorithm import AlgorithmConfig, FormulaConfig
from burnish.config.section import Section
from burnish.errors import UsageError, refusing, together
from burnish.files.strict_json import shortened
from burnish.functions import did_you_mean


def with_settings(
    function: Callable[..., Any], formula: FormulaConfig, setting: str
) -> Callable[..., Any]:
    """Return a function that passes the formula's own settings to `function` as its last argument.

    A function has settings if its last parameter is annotated with a `Section` other than `AlgorithmConfig`. It may have fewer
    parameters before that one than there are arguments; the rest is left out. A function without settings is returned as it is.

    Raises `UsageError` for settings that do not fit the class, and for settings of a function that has none.
    """
    parameters = _parameters(function)
    section = _section(function, parameters[-1]) if parameters else None
    if section is None:
        if formula.settings:
            named = ", ".join(f"{setting}.{name}" for name in formula.settings)
            raise UsageError(
                f"{setting}: {formula.name} has no settings of its own",
                have=named,
                want="a function whose last parameter is annotated with a class of settings, a burnish.Section",
                do=f"remove {named}, or declare them in the function's file",
            )
        return function
    settings = own_settings(formula, section, setting)
    count = len(parameters) - 1

    def with_last(*arguments: Any) -> Any:
        return function(*arguments[:count], settings)

    return with_last


def own_settings(formula: FormulaConfig, section: type[Section], setting: str) -> Section:
    """Return the settings as their class has them. Raises `UsageError` with every field that does not fit."""
    subject = f"{setting}: {formula.name}"
    with refusing(
        f"{subject} cannot read its settings",
        want=f"{section.__name__} of these settings",
        do=f"correct {section.__name__}",
    ):
        try:
            return formula.settings_as(section)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
    problems = [_misfit(fault, formula, section, setting) for fault in faults]
    raise together(problems, f"the settings of {subject}")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # written in C
        return []


def _section(function: Callable[..., Any], parameter: inspect.Parameter) -> type[Section] | None:
    """Return the class of settings that annotates a parameter, or None."""
    kind = parameter.annotation
    if isinstance(kind, str):  # `from __future__ import annotations` makes every annotation a text
        names = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            kind = attrgetter(kind)(SimpleNamespace(**names))
        except AttributeError:
            return None
    is_own = isinstance(kind, type) and issubclass(kind, Section) and kind is not AlgorithmConfig
    return kind if is_own else None


def _misfit(
    fault: ErrorDetails, formula: FormulaConfig, section: type[Section], setting: str
) -> UsageError:
    """Return the error for one fault that pydantic found, with the class in the user's file and its field."""
    field = ".".join(map(str, fault["loc"]))
    key = f"{setting}.{field}"
    home = formula.name.rpartition(":")[0]
    named = f"{section.__name__}.{field} of {home}" if home else f"setting {key}"
    have = f"{key}: {shortened(fault['input'])}"
    if fault["type"] == "extra_forbidden":
        return UsageError(
            f"{setting}: there is no {named}",
            have=have,
            want=f"one of {', '.join(section.model_fields)}",
            do=did_you_mean(field, section.model_fields) or f"remove {key}",
        )
    if fault["type"] == "missing":
        return UsageError(
            f"{setting}: {named} is not set", have="nothing", want="a value", do=f"set {key}"
        )
    return UsageError(
        f"{setting}: {named} has a value that does not fit",
        have=have,
        want=fault["msg"].removeprefix("Input should be "),
        do=f"correct {key}",
    )
