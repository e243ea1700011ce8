"""Read the arguments of another framework, and take values from them by the ends of their names."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from string import Template
from typing import Any

from burnish.config.document import dotted, one_line
from burnish.config.load import read_document, read_text
from burnish.config.parsing import parse_value
from burnish.errors import UsageError

_NAME = re.compile(r"\+{0,2}[A-Za-z_][\w.]*")
_ASSIGNMENT = r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*$"
"""A line of a shell script that sets a variable."""
_ENDS_OF_A_COMMAND = ("&&", "||", "|", ";", "&")
_YAML = (".yaml", ".yml")
_LARGEST = 1e15

Arguments = dict[str, Any]
"""Values by name, as another framework calls it. What is translated is removed."""


def read_arguments(words: Sequence[str]) -> Arguments:
    """Read the file that a single word names, or `key=value` and `--flag value` as they are typed.

    A file is YAML or a shell script. Words of neither kind are left out. Raises `MissingError` and `UsageError`.
    """
    if len(words) == 1 and "=" not in words[0] and not words[0].startswith("-"):
        return _of_file(words[0])
    return _of_words(words)


def take(arguments: Arguments, ending: str) -> Any:
    """Remove the first argument with an ending, such as `max_steps` or `kl_ctrl.kl_coef`; return its value, or None."""
    name = _first(arguments, ending)
    return None if name is None else arguments.pop(name)


def look_up(arguments: Arguments, ending: str) -> Any:
    """Return the value of the first argument with an ending, or None."""
    name = _first(arguments, ending)
    return None if name is None else arguments[name]


def number(arguments: Arguments, ending: str) -> Any:
    """Return the number with an ending, or None. Raises `UsageError` for anything else."""
    name = _first(arguments, ending)
    value = None if name is None else arguments[name]
    is_number = isinstance(value, int | float) and abs(value) < _LARGEST
    if value is not None and not is_number:
        raise UsageError(
            f"{name} is not a number", have=one_line(value), want="a number", do=f"correct {name}"
        )
    return value


def _first(arguments: Arguments, ending: str) -> str | None:
    return next((name for name in arguments if f".{name}".endswith(f".{ending}")), None)


def _of_file(name: str) -> Arguments:
    if name.endswith(_YAML):
        return dict(dotted(read_document(name).values))
    script = _without_variables(read_text(name))
    try:
        return _of_words(shlex.split(script, comments=True))
    except ValueError as error:
        raise UsageError(
            f"{name} is not a shell script", have=error, do="give the arguments themselves"
        ) from None


def _without_variables(script: str) -> str:
    """Return a shell script in lines of whole commands, with the values of its variables in place."""
    script = re.sub(r"`#.*?`", "", script)  # a remark between two lines of a command
    script = script.replace("\\\n", " ")
    # From the last to the first, because a variable's value may name an earlier one.
    for variable, value in reversed(re.findall(_ASSIGNMENT, script, re.M)):
        script = Template(script).safe_substitute({variable: value.strip("\"'")})
    script = os.path.expandvars(script)
    return re.sub(_ASSIGNMENT, "", script, flags=re.M)


def _of_words(words: Sequence[str]) -> Arguments:
    arguments: Arguments = {}
    flag = ""  # the one that the next words may be values of
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
        if equals and _NAME.fullmatch(name):
            arguments[name.lstrip("+")] = _value(text)
            flag = ""
        elif word.startswith("--"):
            flag = name
            arguments[flag] = True
        elif word in _ENDS_OF_A_COMMAND or word.endswith(".py"):
            flag = ""
        elif flag:
            arguments[flag] = _with_value(arguments[flag], _value(word))
    if str(arguments.get("config", "")).endswith(_YAML):
        arguments = {**_of_file(arguments.pop("config")), **arguments}
    return arguments


def _with_value(earlier: Any, value: Any) -> Any:
    """Add a value to a flag's earlier ones: the first stands alone, further ones make a list."""
    if earlier is True:
        return value
    return [*earlier, value] if isinstance(earlier, list) else [earlier, value]


def _value(text: str) -> Any:
    try:
        return parse_value(text, "value").values
    except UsageError:
        return text
