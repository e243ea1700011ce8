"""Turn arguments of another framework into a configuration.

The tables in `burnish.config.foreign_names` have what a single argument means. A framework's module in this package has what
several arguments mean together. A further framework is one table, and a module where it needs one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.config.document import one_line, write_yaml
from burnish.config.foreign_names import explain_foreign, known_ending, translate_setting
from burnish.config.keys import is_default, known_keys
from burnish.config.load import load_settings
from burnish.config.schema import FORMULAS
from burnish.config.suggestions import suggestion
from burnish.errors import UsageError
from burnish.methods.rl import RL
from burnish.methods.sft import SFT
from burnish.translate.foreign_arguments import Arguments, read_arguments
from burnish.translate.trl import combine_trl
from burnish.translate.verl import combine_verl

_COMBINE: tuple[Callable[[Arguments], dict[str, Any]], ...] = (combine_verl, combine_trl)
_OF_RL = ("algorithm.", "critic.", "reward.", "rollout.")
"""Sections that only reinforcement learning reads."""


def translate_arguments(words: Sequence[str]) -> str:
    """Return YAML with comments for a file's name, or for arguments as they are typed. Unknown ones become comments.

    Raises `UsageError` if nothing is set, or if arguments do not fit together.
    """
    arguments = read_arguments(words)
    if not arguments:
        raise UsageError(
            "there is nothing to translate",
            have=shlex.join(words),
            want="key=value, --flag value, a YAML file or a shell script",
            do="give the arguments as they are typed, or the name of their file",
        )
    settings: dict[str, Any] = {}
    for combine in _COMBINE:
        settings |= combine(arguments)
    left_out = []
    for name, value in arguments.items():
        translated, reason = _translate_one(name, value)
        for key, meant in translated.items():
            if settings.setdefault(key, meant) != meant:
                reason = f"{key} is {one_line(settings[key])} already"
        if reason:
            left_out.append(f"{name}={one_line(value)}: {reason}")
    return _written(settings, left_out)


def _translate_one(name: str, value: Any) -> tuple[dict[str, Any], str]:
    """Return the settings that an argument means, or none and the reason."""
    explanation = explain_foreign(known_ending(name) or "")
    settings = translate_setting(name, value)
    if settings is None and not explanation and (key := _namesake(name)):
        settings = {key: value}
    if settings is not None:
        refusal = _refusal(settings)
        return ({}, refusal) if refusal else (settings, "")
    _, do = suggestion(name)
    return {}, explanation or (do if do.startswith("did you mean") else "not known here")


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


def _written(settings: Mapping[str, Any], left_out: Sequence[str]) -> str:
    """Return settings that are no defaults as YAML, and as comments what was left out and what is still to do."""
    method = RL() if any(key.startswith(_OF_RL) for key in settings) else SFT()
    if not method.generates:
        settings = {_of_sft(key): value for key, value in settings.items()}
    tree = _nested({key: value for key, value in settings.items() if not is_default(key, value)})
    lines = [f"# for burnish {method.name}"]
    if tree:
        lines += write_yaml(tree).splitlines()
    if left_out:
        lines += ["", "# Left out:", *(f"#   {reason}" for reason in left_out)]
    try:
        method.check(load_settings(tree, {}), None)
    except UsageError as error:
        lines += ["", "# Still to do:", *(f"#   {line}" for line in str(error).splitlines())]
    return "\n".join(lines) + "\n"


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
