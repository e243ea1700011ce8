"""Read the arguments of another framework from a file, or as they are typed."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.config.document import dotted
from burnish.config.load import read_document, read_text
from burnish.config.parsing import parse_value
from burnish.errors import UsageError
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.shell_variables import Variables

_NAME = re.compile(r"\+{0,2}[A-Za-z_][\w.]*")
_ENVIRONMENT = re.compile(r"[A-Z_]\w*=.*", re.S)
"""A word that sets an environment variable. No framework has a setting that begins with a capital."""
_MODULE = {"-m", "--module"}
"""What stands before the name of a program that Python imports."""
_ENDS_OF_A_COMMAND = ("&&", "||", "|", ";", "&")
_YAML = (".yaml", ".yml")
_TOML = ".toml"
_SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".txt")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")


def read_commands(words: Sequence[str]) -> list[Arguments]:
    """Read the file that the first word names, or `key=value` and `--flag value` as they are typed.

    A file is YAML, TOML or a shell script. Further words are the script's own. Each command of a script with arguments is one
    of the result. Raises `MissingError` and `UsageError`.
    """
    first = words[0] if words else ""
    is_script = first.endswith(_SHELL) and os.path.isfile(first)
    if first and "=" not in first and not first.startswith("-") and (len(words) == 1 or is_script):
        return _of_file(first, words[1:])
    return [_of_words(words)]


def _of_file(name: str, words: Sequence[str] = ()) -> list[Arguments]:
    ending = os.path.splitext(name)[1]
    if ending in _YAML:
        return [Arguments(dict(dotted(read_document(name).values)))]
    if ending == _TOML:
        return [Arguments(dict(dotted(_read_toml(name))))]
    text = read_text(name)
    if ending not in _SHELL and ending and not re.match(r"#!.*sh\b", text):
        is_python = ending in (".py", ".ipynb")
        raise UsageError(
            f"{name} is {'a Python program' if is_python else 'no file of arguments'}",
            have=f"a file that ends in {ending}",
            want="a shell script, YAML or TOML, or the arguments as they are typed",
            do="give the command line that starts it" if is_python else "name another file",
        )
    return _of_script(name, text, words)


def _of_script(name: str, text: str, words: Sequence[str]) -> list[Arguments]:
    """Return the arguments of each program that a shell script starts."""
    from burnish.translate.shell import read_script

    script = read_script(name, text, words)
    commands = []
    for command in script.commands:
        arguments = _of_words(command.words, script.variables)
        arguments.source = f"{name}:{command.line}"
        arguments.doubt = command.doubt
        whole = " ".join(command.words)
        taken = sorted(
            variable
            for variable in script.variables.of_environment
            if len(value := script.variables.environ[variable]) > 1 and value in whole
        )
        if taken:
            arguments.remarks.append(f"from this machine's environment: {', '.join(taken)}")
        if arguments.given:
            commands.append(arguments)
    if not commands:
        line = script.ended_at
        raise UsageError(
            f"{name} starts no program with arguments",
            have=f"line {line} ends it" if line else "no such command",
            want="a command with key=value or --flag value",
            do=f"give the script its own arguments after {name}, set its variables in the environment, or name another file",
        )
    return commands


def _read_toml(name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(name))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is no TOML", have=error, do="correct the file") from None


def _of_words(words: Sequence[str], variables: Variables | None = None) -> Arguments:
    """Read the words of a command. The first ones name its program. `variables` say what is unknown in them."""
    arguments: dict[str, Any] = {}
    program: list[str] = []
    strays: set[str] = set()
    unknown: dict[str, str] = {}
    flag = ""  # the one that the next words may be values of
    started, words = _after_launcher(words)
    program += started
    for written in words:
        word = variables.readable(written) if variables else written
        marks = variables.marks_in(written) if variables else []
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
        owner = name.lstrip("+")
        if (_ENVIRONMENT.fullmatch(word) and not arguments) or not _MODULE.isdisjoint(
            (word, *program[-1:])
        ):
            program.append(word)
            flag = ""
            continue
        if equals and _NAME.fullmatch(name):
            arguments[owner] = _value(text)
            flag = ""
        elif word.startswith("--"):
            flag = name
            arguments[flag] = True
        elif word in _ENDS_OF_A_COMMAND or (
            word.endswith(".py") and not _is_value(arguments, flag, program)
        ):
            program.append(word)
            flag = ""
        elif flag:
            owner = flag
            arguments[flag] = _with_value(arguments[flag], _value(word))
        elif not arguments and "=" not in word:
            program.append(word)
        else:
            owner = word
            strays.add(word)
            arguments[word] = True
        if owner in arguments:
            unknown.pop(owner, None)
            if marks:
                unknown[owner] = "; ".join(mark.reason for mark in marks)
    if str(arguments.get("config", "")).endswith(_YAML):
        arguments = {**_of_file(arguments.pop("config"))[0].given, **arguments}
    return Arguments(arguments, tuple(program), frozenset(strays), unknown)


def _after_launcher(words: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Return the words of what starts Python, whose options are no settings, and the other words."""
    place = list(words).index("--") + 1 if "--" in words else 0  # of `ray job submit`
    python = (each for each in range(place, len(words)) if _PYTHON.search(words[each]))
    place = next(python, place)
    if any(
        _NAME.match(word) and not _ENVIRONMENT.match(word) and "=" in word for word in words[:place]
    ):
        return [], words  # an argument that ends in the name of an interpreter
    return list(words[:place]), words[place:]


def _is_value(arguments: Mapping[str, Any], flag: str, program: Sequence[str]) -> bool:
    """Return whether a word that ends in `.py` is the value of a flag, and not the program."""
    has_program = any(word.endswith(".py") for word in program) or not _MODULE.isdisjoint(program)
    return bool(flag) and arguments[flag] is True and has_program


def _with_value(earlier: Any, value: Any) -> Any:
    """Add a value to a flag's earlier ones: the first stands alone, further ones make a list."""
    if earlier is True:
        return value
    return [*earlier, value] if isinstance(earlier, list) else [earlier, value]


def _value(text: str) -> Any:
    try:
        value = parse_value(text, "value").values
        # A list in quotes of its own, as Hydra takes it.
        if text[:1] in "'\"" and str(value).startswith("["):
            value = parse_value(value, "value").values
    except UsageError:
        return text
    return value
