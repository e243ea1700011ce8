"""Answer a key that does not exist: another framework's name, a misspelt one, or neither.

Names of other frameworks (`foreign_names.yaml`) get the setting to write; a similar name becomes a question.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from burnish.config.keys import Key, plain_name


class ForeignNames(NamedTuple):
    """Names of settings in verl, TRL and OpenRLHF."""

    sections: list[str]
    """Sections without a counterpart; each name in them is answered by itself."""
    renamed: dict[str, str]
    """The key of the same setting here."""
    different: dict[str, str]
    """The nearest keys, a colon, and the difference."""
    absent: dict[str, str]
    """Why no setting is needed, or there."""


@functools.cache
def foreign_names() -> ForeignNames:
    """Read the table, once."""
    return ForeignNames(
        **yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text())
    )


class Suggestion(NamedTuple):
    """The last two lines of the error."""

    want: str
    """What would be right."""
    do: str
    """What to do about it."""


def answer_unknown(name: str, known: Mapping[str, Key]) -> Suggestion:
    """What to say to someone who wrote `name` (`trainer.save_freq`, `rolout.n`), which is none of the `known` keys."""
    name, foreign = plain_name(name), foreign_names()
    for end in _ends(name):
        if key := foreign.renamed.get(end):
            return Suggestion(f"{key}, which is called {end} elsewhere", f"write {key}")
        if text := foreign.different.get(end):
            return Suggestion(text, f"set {text.partition(':')[0]}")
        if text := foreign.absent.get(end):
            return Suggestion(f"nothing in its place: {text}", "leave it out")
        if "." in end and end in known:
            return Suggestion("a known key", f"did you mean {end}?")
    if near := nearest(name, known):
        return Suggestion("a known key", f"did you mean {near}?")
    section = known.get(name.rpartition(".")[0])
    if section and section.section:
        want = f"one of {', '.join(section.section.model_fields)}"
        return Suggestion(want, f"see `burnish config explain {section.name}`")
    return Suggestion("a known key", "see `burnish config explain` for all keys")


def nearest(name: str, known: Mapping[str, Key]) -> str | None:
    """Return the known key most like `name`, or None.

    In order: a similar key of the same section; a key of another section with the same last part (`n` for `rollout.n`); then any
    similar key, in the same section, as a whole, by its last part, or as another framework spells it.
    """
    section, _, last = name.rpartition(".")
    ends = {each: each.rpartition(".")[2] for each in known}

    def best(end: str) -> str | None:
        candidates = [each for each in known if ends[each] == end]
        alike = difflib.SequenceMatcher(b=name)

        def likeness(candidate: str) -> float:
            alike.set_seq1(candidate)
            return alike.ratio()

        return max(candidates, key=likeness, default=None)

    siblings = [ends[each] for each in known if each.rpartition(".")[0] == section]
    prefix = f"{section}." if section else ""
    if close := difflib.get_close_matches(last, siblings, n=1, cutoff=0.8):
        return prefix + close[0]
    if found := best(last):
        return found
    if close := difflib.get_close_matches(last, siblings, n=1):
        return prefix + close[0]
    others = [each for each in known if not (known[each].section and name.startswith(f"{each}."))]
    if close := difflib.get_close_matches(name, others, n=1, cutoff=0.75):
        return close[0]
    renamed = foreign_names().renamed
    if close := difflib.get_close_matches(last, [*ends.values(), *renamed], n=1, cutoff=0.75):
        return renamed.get(close[0]) or best(close[0])
    return None


def _ends(name: str) -> Iterator[str]:
    """The whole name, then without its first section, without its second, ..."""
    while name:
        yield name
        name = name.partition(".")[2]
