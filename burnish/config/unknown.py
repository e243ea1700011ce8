"""Answer a key that does not exist: another framework's name, a misspelt one, or neither.

Other frameworks' names (`burnish.config.elsewhere`) are answered with what to write; a likeness is asked as a question.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from burnish.config.elsewhere import ABSENT, DIFFERENT, RENAMED
from burnish.config.keys import Key, plain_name


class Suggestion(NamedTuple):
    """The last two lines of the error."""

    want: str
    """What would be right."""
    do: str
    """What to do about it."""


def answer_unknown(name: str, known: Mapping[str, Key]) -> Suggestion:
    """What to say to someone who wrote `name` (`trainer.save_freq`, `rolout.n`), which is none of the `known` keys."""
    name = plain_name(name)
    for end in _ends(name):
        if key := RENAMED.get(end):
            return Suggestion(f"{key}, which is called {end} elsewhere", f"write {key}")
        if text := DIFFERENT.get(end):
            return Suggestion(text, f"set {text.partition(':')[0]}")
        if text := ABSENT.get(end):
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
    if close := difflib.get_close_matches(last, [*ends.values(), *RENAMED], n=1, cutoff=0.75):
        return RENAMED.get(close[0]) or best(close[0])
    return None


def _ends(name: str) -> Iterator[str]:
    """The whole name, then without its first section, without its second, ..."""
    while name:
        yield name
        name = name.partition(".")[2]
