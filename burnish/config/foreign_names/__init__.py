"""Read what other frameworks call the settings. Only errors, short names and `burnish config translate` load this.

Each framework is one table, a YAML file of this folder. A table may use others, whose names it has too. The text of a name
states any difference in meaning, because nobody should change the algorithm by following it. Rare names, and names that are the
same here, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from burnish.config.keys import known_keys

_TABLES = ("transformers", "trl", "verl", "openrlhf", "axolotl", "llama_factory", "prime_rl")
"""All tables. Without a framework, the first one with a name answers."""


class ForeignNames(NamedTuple):
    """Names of settings in other frameworks.

    A name is the last part of a dotted name, or more parts where the last is ambiguous (`rollout.name` of verl).
    """

    sections: list[str]
    """Sections without a counterpart; each name in them is answered by itself."""
    renamed: dict[str, str]
    """The key of the same setting here."""
    different: dict[str, str]
    """The nearest keys, a colon, and the difference."""
    absent: dict[str, str]
    """Why Burnish does not need or does not have the setting. `fsdp*` is every whole name that begins so."""
    values: dict[str, dict[str, dict[str, Any]]]
    """The same settings here, by name and then by value, in lower case or "*" for any value."""


@cache
def foreign_names(framework: str = "") -> ForeignNames:
    """Return a framework's own names and those that it shares; without a framework, the names of all."""
    names = ForeignNames([], {}, {}, {}, {})
    tables = [framework, *_table(framework).get("uses", ())] if framework else _TABLES
    for each in tables:
        _add(names, _table(each), patterns=bool(framework))
    return names


@cache
def marks_of(framework: str) -> frozenset[str]:
    """Return names that only this framework has."""
    return frozenset(_table(framework)["marks"])


@cache
def _table(framework: str) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(
        (Path(__file__).parent / f"{framework}.yaml").read_text()
    )
    return table


def _add(names: ForeignNames, table: dict[str, Any], *, patterns: bool) -> None:
    """Add the names of a table that are not there yet."""
    known = names.renamed.keys() | names.different.keys() | names.absent.keys()
    names.sections.extend(table.get("sections", []))
    for part in ("renamed", "different", "absent"):
        for name, meaning in table[part].items():
            if name not in known and (patterns or not name.endswith("*")):
                getattr(names, part)[name] = meaning
    for name, by_value in table["values"].items():
        if name not in known:
            names.values[name] = {str(value).lower(): found for value, found in by_value.items()}


def known_ending(name: str, framework: str = "") -> str | None:
    """Return the longest ending of a dotted name that is in a table or a setting here, or the pattern of a table, or None.

    A single last part of several is no setting here: `optim.n` elsewhere is not `n`.
    """
    tables = foreign_names(framework)
    for ending in _endings(name):
        if ending in tables.renamed or ending in tables.different or ending in tables.absent:
            return ending
        if ending in known_keys() and ("." in ending or ending == name):
            return ending
    patterns = [each for each in tables.absent if each[-1] == "*" and name.startswith(each[:-1])]
    return max(patterns, key=len, default=None)


def translate_setting(name: str, value: Any, framework: str = "") -> dict[str, Any] | None:
    """Return the settings here that mean `name: value` elsewhere; None if only a person can tell."""
    ending = known_ending(name, framework)
    if ending is None:
        return None
    tables = foreign_names(framework)
    if ending in tables.values:
        by_value = tables.values[ending]
        settings = by_value.get(str(value).lower(), by_value.get("*"))
        if settings is None:
            return None
        return {key: value if meant == "*" else meant for key, meant in settings.items()}
    if ending in tables.renamed:
        return {tables.renamed[ending]: value}
    if ending in tables.different or ending in tables.absent or known_keys()[ending].section:
        return None
    return {ending: value}


def explain_foreign(ending: str, framework: str = "") -> str:
    """Return what stands here for a name of the tables; "" for any other."""
    tables = foreign_names(framework)
    if ending in tables.renamed:
        return f"{tables.renamed[ending]}, which is called {ending} elsewhere"
    if ending in tables.absent:
        return f"nothing in its place: {tables.absent[ending]}"
    return tables.different.get(ending, "")


def _endings(name: str) -> Iterator[str]:
    """Yield the name, then the name without its first section, ..."""
    while name:
        yield name
        name = name.partition(".")[2]
