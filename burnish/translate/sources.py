"""Read the arguments of another framework from a file, or as they are typed."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from string import Template
from typing import Any

from burnish.config.document import dotted
from burnish.config.load import read_document, read_text
from burnish.config.parsing import parse_value
from burnish.errors import UsageError
from burnish.translate.foreign_arguments import Arguments

_NAME = re.compile(r"\+{0,2}[A-Za-z_][\w.]*")
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*=.*")
"""A word that sets an environment variable. No framework has a setting without a lower-case letter."""
_ASSIGNMENT = r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*$"
"""A line of a shell script that sets a variable."""
_ENDS_OF_A_COMMAND = ("&&", "||", "|", ";", "&")
_YAML = (".yaml", ".yml")
_TOML = ".toml"


def read_arguments(words: Sequence[str]) -> Arguments:
    """Read the file that a single word names, or `key=value` and `--flag value` as they are typed.

    A file is YAML, TOML or a shell script. Raises `MissingError` and `UsageError`.
    """
    if len(words) == 1 and "=" not in words[0] and not words[0].startswith("-"):
        return _of_file(words[0])
    return _of_words(words)


def _of_file(name: str) -> Arguments:
    if name.endswith(_YAML):
        return Arguments(dict(dotted(read_document(name).values)))
    if name.endswith(_TOML):
        return Arguments(dict(dotted(_read_toml(name))))
    script = _without_variables(read_text(name))
    try:
        return _of_words(shlex.split(script, comments=True))
    except ValueError as error:
        raise UsageError(
            f"{name} is not a shell script", have=error, do="give the arguments themselves"
        ) from None


def _read_toml(name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(name))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is no TOML", have=error, do="correct the file") from None


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
    """Read the words of a command. The first ones name its program."""
    arguments: dict[str, Any] = {}
    program: list[str] = []
    strays: set[str] = set()
    flag = ""  # the one that the next words may be values of
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
        if _ENVIRONMENT.fullmatch(word) and not arguments:
            program.append(word)
        elif equals and _NAME.fullmatch(name):
            arguments[name.lstrip("+")] = _value(text)
            flag = ""
        elif word.startswith("--"):
            flag = name
            arguments[flag] = True
        elif word in _ENDS_OF_A_COMMAND or word.endswith(".py"):
            program.append(word)
            flag = ""
        elif flag:
            arguments[flag] = _with_value(arguments[flag], _value(word))
        elif not arguments and "=" not in word:
            program.append(word)
        else:
            strays.add(word)
            arguments[word] = True
    if str(arguments.get("config", "")).endswith(_YAML):
        arguments = {**_of_file(arguments.pop("config")).given, **arguments}
    return Arguments(arguments, tuple(program), frozenset(strays))


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
