"""Turn arguments of another framework into a configuration, and say what became of each.

The tables in `burnish.config.foreign_names` have what a single argument means. A framework's module in this package has what
several arguments mean together, and what the framework does without being told.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from burnish.config.algorithm import FORMULAS
from burnish.config.document import one_line, write_yaml
from burnish.config.foreign_names import (
    explain_foreign,
    foreign_names,
    known_ending,
    translate_setting,
)
from burnish.config.keys import is_default, known_keys
from burnish.config.load import load_settings
from burnish.config.suggestions import suggestion
from burnish.errors import UsageError, count_text
from burnish.method import Method
from burnish.methods.rl import RL
from burnish.methods.sft import SFT
from burnish.methods.table import METHODS
from burnish.translate.axolotl import AXOLOTL
from burnish.translate.foreign_arguments import Arguments, Fate
from burnish.translate.framework import Framework
from burnish.translate.llama_factory import LLAMA_FACTORY
from burnish.translate.openrlhf import OPENRLHF
from burnish.translate.prime_rl import PRIME_RL
from burnish.translate.sources import read_commands
from burnish.translate.trl import OPEN_R1, TRL, combine_shared
from burnish.translate.verl import VERL

_FRAMEWORKS = (VERL, TRL, OPEN_R1, OPENRLHF, AXOLOTL, LLAMA_FACTORY, PRIME_RL)
_SHARED = (VERL.combine, combine_shared)
"""What combines arguments that could be of several frameworks."""
_OTHER_PROGRAM = re.compile(
    r"serve(_rm|\b)|lora_combiner|batch_inference|llamafactory-cli (?!train)"
)
"""A program of a framework that does not train."""
_SHOWN = 5
_OF_RL = ("algorithm.", "critic.", "reward.", "rollout.")
"""Sections that only reinforcement learning reads."""
_LISTS = ("carried", "as by default", "have no counterpart", "left for you to decide")
"""Each argument is in one of them. All but the first are printed."""


def translate_arguments(words: Sequence[str]) -> str:
    """Return YAML with comments for a file's name, or for arguments as they are typed.

    The comments name each argument that the settings do not show, and count all of them. Raises `UsageError` if nothing is set,
    or if arguments do not fit together.
    """
    arguments = _chosen(read_commands(words))
    if not arguments.given:
        raise UsageError(
            "there is nothing to translate",
            have=shlex.join(words),
            want="key=value, --flag value, a YAML or TOML file, or a shell script",
            do="give the arguments as they are typed, or the name of their file",
        )
    for name, reason in arguments.unknown.items():
        arguments.leave(reason, name)
    framework = _recognized(arguments)
    table = framework.table if framework else ""
    if framework:
        arguments.imply(framework.defaults(arguments))
    for combine in [framework.combine] if framework else _SHARED:
        combine(arguments)
    for name, value in arguments.unsettled.items():
        _settle_one(arguments, name, value, table)
    settings = _settings_of(arguments)
    generates = framework.generates(arguments) if framework else None
    if generates is None:
        generates = any(key.startswith(_OF_RL) for key in settings)
    named = framework.preferences(arguments) if framework else ""
    method = METHODS[named] if named else RL() if generates else SFT()
    return _written(arguments, settings, method, framework)


def _chosen(commands: Sequence[Arguments]) -> Arguments:
    """Return the command that trains. Raises `UsageError` if several do, or if only a run would tell."""
    own = [each for each in commands if any(one.recognizes(each) for one in _FRAMEWORKS)]
    own = [each for each in own if not _OTHER_PROGRAM.search(" ".join(each.program))] or own
    known = own or [each for each in commands if any(map(known_ending, each.given))] or commands[:1]
    different = [
        each
        for place, each in enumerate(known)
        if not any(each.given == other.given for other in known[:place])
    ]
    if len(different) > 1:
        raise UsageError(
            "this script starts several programs",
            have=", ".join(each.source for each in different),
            want="the arguments of one",
            do="give the arguments of one as they are typed",
        )
    arguments = known[0]
    if arguments.doubt:
        raise UsageError(
            f"{arguments.source} cannot be read without running it",
            have=arguments.doubt,
            want="a program that is started in any case",
            do="give its arguments as they are typed",
        )
    return arguments


def _recognized(arguments: Arguments) -> Framework | None:
    """Return the framework whose arguments these are; None if several have them. Raises `UsageError` for none and for a mixture."""
    frameworks = [each for each in _FRAMEWORKS if each.recognizes(arguments)]
    if len(frameworks) > 1:
        raise UsageError(
            "these arguments are of several frameworks",
            have=" and ".join(each.name for each in frameworks),
            want="the arguments of one",
            do="translate one after the other",
        )
    if not frameworks and not any(map(known_ending, arguments.given)):
        raise UsageError(
            "these arguments are of no framework that Burnish knows",
            have=", ".join(list(arguments.given)[:_SHOWN]),
            want=", ".join(each.name for each in _FRAMEWORKS),
            do="give a script, a command line or a configuration of one of these",
        )
    return frameworks[0] if frameworks else None


def _settle_one(arguments: Arguments, name: str, value: Any, table: str) -> None:
    """Give a fate to an argument that means something alone. `table` has the names of its framework; "" of all."""
    if name in arguments.strays:
        arguments.leave("no argument", name)
        return
    ending = known_ending(name, table) or ""
    explanation = explain_foreign(ending, table)
    settings = translate_setting(name, value, table)
    if settings is None and not explanation and not table and (key := _namesake(name)):
        settings = {key: value}
    if value is None and table:
        settings = {}  # nothing is set, so the framework's default counts
    if settings is not None:
        arguments.carry(settings, name)
    elif ending in foreign_names(table).absent:
        arguments.drop(foreign_names(table).absent[ending], name)
    else:
        _, do = suggestion(name)
        is_near = do.startswith("did you mean")
        arguments.leave(explanation or (do if is_near else "not known here"), name)


def _namesake(name: str) -> str | None:
    """Return the only setting, or the only one of rollout, with a name's last part."""
    last = name.rpartition(".")[2]
    keys = [
        key
        for key, known in known_keys().items()
        if key.rpartition(".")[2] == last and not known.section and "[" not in key
    ]
    if len(keys) > 1:
        keys = [key for key in keys if key.startswith("rollout.")]
    return keys[0] if len(keys) == 1 else None


def _settings_of(arguments: Arguments) -> dict[str, Any]:
    """Return the settings of all arguments. Leave those to the person whose settings clash or do not fit."""
    settings: dict[str, Any] = {}
    # What the framework does by itself counts only where nothing given says otherwise.
    order = sorted(arguments.fates, key=lambda fate: not _is_given(arguments, fate))
    arguments.fates.clear()
    for fate in order:
        meant = {key: _fitted(key, value) for key, value in (fate.settings or {}).items()}
        reason = _refusal(meant)
        for key, value in meant.items():
            if settings.get(key, value) != value:
                reason = f"{key} is {one_line(settings[key])} already"
        if reason:
            arguments.fates.append(Fate(fate.names, reason=reason, is_open=True))
        else:
            arguments.fates.append(fate)
            settings |= meant
    return settings


def _is_given(arguments: Arguments, fate: Fate) -> bool:
    return any(name in arguments.given for name in fate.names)


def _fitted(key: str, value: Any) -> Any:
    """Return 3 for 3.0 where a whole number is wanted."""
    known = known_keys().get(key)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if known and is_whole and "whole number" in known.values else value


def _refusal(settings: Mapping[str, Any]) -> str:
    """Return why values do not fit, or ""."""
    owners: dict[str, Any] = {}
    for key in settings:
        formula, _, own = key.rpartition(".")
        if formula in FORMULAS and own != "name":
            owners[formula] = FORMULAS[formula].formulas_with(own)[0]
    try:
        load_settings(owners, settings)
    except UsageError as error:
        return f"{', '.join(settings)} is {error.want}"
    return ""


def _written(
    arguments: Arguments,
    settings: Mapping[str, Any],
    method: Method,
    framework: Framework | None,
) -> str:
    """Return settings that are no defaults as YAML, and the fate of each argument and what is still to do as comments."""
    if not method.generates:
        settings = {_of_sft(key): value for key, value in settings.items()}
    tree = _nested({k: value for k, value in settings.items() if not _is_default(k, value, method)})
    lines = [f"# for burnish {method.name}"]
    if tree:
        lines += write_yaml(tree).splitlines()
    for title, entries in _sections(arguments, framework, method):
        if entries:
            lines += ["", f"# {title}:", *(f"#   {entry}" for entry in entries)]
    try:
        method.check(load_settings(tree, {}), None)
    except UsageError as error:
        lines += ["", "# Still to do:", *(f"#   {line}" for line in str(error).splitlines())]
    return "\n".join([*lines, "", f"# {_count(arguments, method)}"]) + "\n"


def _is_default(key: str, value: Any, method: Method) -> bool:
    """Return whether a value is what a setting, perhaps the method's own, is without being set."""
    section, _, own = key.partition(".")
    if section != "method":
        return is_default(key, value)
    field = method.Settings.model_fields.get(own)
    return field is not None and bool(field.get_default(call_default_factory=True) == value)


def _sections(
    arguments: Arguments, framework: Framework | None, method: Method
) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and lines of what the settings do not show."""
    yield "Note", arguments.remarks
    if framework:
        implied = _implied(arguments, method)
        if not method.generates:
            implied = {_of_sft(key): value for key, value in implied.items()}
        own = [f"{key}: {one_line(value)}" for key, value in implied.items()]
        yield f"Set because {framework.name} does it without being told", own
    lists = _lists(arguments, method)
    for title in _LISTS[1:]:
        yield title.capitalize(), [_line(arguments, *entry) for entry in lists[title]]


def _line(arguments: Arguments, name: str, reason: str) -> str:
    """Return an argument as it was given, and the reason of its fate."""
    value = "" if name in arguments.strays else f"={one_line(arguments.given[name])}"
    return f"{name}{value}: {reason}" if reason else name + value


def _implied(arguments: Arguments, method: Method) -> dict[str, Any]:
    """Return the settings that are here only because the framework does that by itself."""
    of_given: dict[str, Any] = {}
    of_others: dict[str, Any] = {}
    for fate in arguments.fates:
        (of_given if _is_given(arguments, fate) else of_others).update(fate.settings or {})
    return {
        key: value
        for key, value in of_others.items()
        if key not in of_given and not _is_default(key, value, method)
    }


def _lists(arguments: Arguments, method: Method) -> dict[str, list[tuple[str, str]]]:
    """Return the given arguments of each list, with the reasons of their fates."""
    lists: dict[str, list[tuple[str, str]]] = {title: [] for title in _LISTS}
    for fate in arguments.fates:
        title = _LISTS[3] if fate.is_open else _LISTS[2]
        if fate.settings is not None:
            meant = [_is_default(k, _fitted(k, x), method) for k, x in fate.settings.items()]
            title = _LISTS[1] if all(meant) else _LISTS[0]
        lists[title] += [(name, fate.reason) for name in fate.names if name in arguments.given]
    return lists


def _count(arguments: Arguments, method: Method) -> str:
    """Return how many arguments are in each list."""
    lengths = {title: len(entries) for title, entries in _lists(arguments, method).items()}
    counts = ", ".join(f"{length} {title}" for title, length in lengths.items())
    lost = len(arguments.given) - sum(lengths.values())
    return f"{count_text(len(arguments.given), 'setting')}: {counts}, {lost} lost"


def _of_sft(key: str) -> str:
    return "batch.examples" if key == "batch.prompts" else key


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by section, in the schema's order."""
    order = {key: place for place, key in enumerate(known_keys())}
    tree: dict[str, Any] = {}
    for key in sorted(settings, key=lambda key: order.get(key, len(order))):
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            if isinstance(place.get(section), str):  # a formula's name alone
                place[section] = {"name": place[section]}
            place = place.setdefault(section, {})
        place[last] = settings[key]
    return tree
