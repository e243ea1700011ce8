"""Answer an unknown key: another framework's name, or a misspelt one."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from burnish.config.document import one_line
from burnish.config.keys import known_keys, plain_name

_LONGEST = 100
"""Most characters of a name that could be a misspelt key."""


class ForeignNames(NamedTuple):
    """Names of settings in verl, TRL and OpenRLHF."""

    sections: list[str]
    """Sections without a counterpart; each name in them is answered by itself."""
    renamed: dict[str, str]
    """The key of the same setting here."""
    different: dict[str, str]
    """The nearest keys, a colon, and the difference."""
    absent: dict[str, str]
    """Why Burnish does not need or does not have the setting."""
    values: dict[str, dict[str, dict[str, Any]]]
    """The same settings here, by name and then by value, in lower case or "*" for any value."""


@cache
def foreign_names() -> ForeignNames:
    """Return `foreign_names.yaml`, read once."""
    tables = yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text())
    values = {
        name: {str(value).lower(): settings for value, settings in found.items()}
        for name, found in tables.pop("values").items()
    }
    return ForeignNames(**tables, values=values)


def counterpart(name: str, value: Any) -> dict[str, Any] | None:
    """Return the settings for another framework's `name: value`; None if only a person can tell."""
    known, foreign = known_keys(), foreign_names()
    for end in _ends(name):
        if found := foreign.values.get(end):
            settings = found.get(str(value).lower(), found.get("*"))
            return settings and {
                key: value if each == "*" else each for key, each in settings.items()
            }
        if end in foreign.different or end in foreign.absent:
            return None
        is_known = end in known and not known[end].section and ("." in end or end == name)
        if key := foreign.renamed.get(end) or (end if is_known else None):
            return {key: value}
    return None


def is_default(name: str, value: Any) -> bool:
    """Return whether a setting has this value by default."""
    key = known_keys().get(name)
    return key is not None and key.default == value


def suggestion(name: str, value: Any = None) -> tuple[str, str]:
    """Return `want` and `do` of the error for an unknown key (`trainer.save_freq`, `rolout.n`) and its value."""
    name, known, foreign = plain_name(name), known_keys(), foreign_names()
    same = None if value is None else counterpart(name, value)
    if same is not None and all(is_default(*each) for each in same.items()):
        return "nothing: that is how it is here", "leave it out"
    plain = " ".join(f"{key}={one_line(each)}" for key, each in (same or {}).items())
    write = f"write {plain}" if plain else ""
    for end in _ends(name):
        if key := foreign.renamed.get(end):
            return f"{key}, which is called {end} elsewhere", write or f"write {key}"
        if text := foreign.different.get(end):
            return text, write or f"set {text.partition(':')[0]}"
        if text := foreign.absent.get(end):
            return f"nothing in its place: {text}", "leave it out"
        if "." in end and end in known:
            return "a known key", write or f"did you mean {end}?"
    namesakes = [key for key in known if key.rpartition(".")[2] == name]
    if len(namesakes) > 1 and name not in known:
        return "a known key", f"did you mean {' or '.join(namesakes)}?"
    if near := nearest(name):
        return "a known key", f"did you mean {near}?"
    section = known.get(name.rpartition(".")[0])
    if section and section.section:
        want = f"one of {', '.join(section.section)}"
        return want, f"see `burnish config explain {section.name}`"
    return "a known key", "see `burnish config explain` for all keys"


def nearest(name: str) -> str | None:
    """Return the known key most like `name`, or None.

    A key's last part and the whole key are compared; the better match counts. Other frameworks' names count by their last part.
    """
    if len(name) > _LONGEST:
        return None
    last = name.rpartition(".")[2]
    scores = {
        key: max(_likeness(name, key), 0.92 * _likeness(last, key.rpartition(".")[2]))
        + 0.1 * _likeness(name, key)
        for key in known_keys()
        if not name.startswith(f"{key}.") or not known_keys()[key].section
    }
    for elsewhere, key in foreign_names().renamed.items():
        scores[key] = max(scores[key], 0.92 * _likeness(last, elsewhere))
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= 0.75 else None


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _ends(name: str) -> Iterator[str]:
    """Yield the name, then the name without its first section, ..."""
    while name:
        yield name
        name = name.partition(".")[2]
