"""Each argument is carried, as by default, without a counterpart, or left to the person, and named where no setting shows it."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.config.foreign_names import foreign_names
from burnish.config.keys import known_keys
from burnish.errors import UsageError
from burnish.translate.translation import translate_arguments

NAMES = foreign_names()
KNOWN = sorted(
    name
    for name in {*NAMES.renamed, *NAMES.different, *NAMES.absent, *known_keys()} - {"config"}
    if "[" not in name  # a setting of a list's item
)
"""Every name that a table of another framework has, and every name that is one here."""
SECTIONS = ["", "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic.", "trainer.", "x."]
COUNT = re.compile(
    r"^# (\d+) settings?: (\d+) carried, (\d+) as by default, (\d+) have no counterpart, "
    r"(\d+) left for you to decide, (\d+) lost$",
    re.M,
)


def values_of(name: str) -> st.SearchStrategy[str]:
    listed = [each for each in NAMES.values.get(name.rpartition(".")[2], {}) if each != "*"]
    plain = ["true", "false", "0", "1", "3.0", "0.5", "-1", "null", "text", "[a, b]", "''"]
    return st.sampled_from([*plain, *listed])


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, str]:
    names = draw(st.lists(st.sampled_from(KNOWN) | st.just("zzz"), min_size=1, max_size=25))
    return {draw(st.sampled_from(SECTIONS)) + name: draw(values_of(name)) for name in names}


def check_account(text: str, names: set[str]) -> None:
    counts = COUNT.search(text)
    assert counts, text
    whole, carried, *others = map(int, counts.groups())
    assert (whole, others[-1]) == (len(names), 0)
    assert whole == carried + sum(others)
    comments = re.findall(r"^#   ([^\s=]+)=", text, re.M)
    assert len(comments) == len(set(comments)) == whole - carried
    assert set(comments) <= names
    assert isinstance(yaml.safe_load(text), dict | None)


@given(arguments())
@draws(200, day=20)
def test_no_argument_is_lost(words: dict[str, str]) -> None:
    try:
        text = translate_arguments([f"{name}={value}" for name, value in words.items()])
    except UsageError:
        return  # arguments that do not fit together
    check_account(text, set(words))


@pytest.mark.nightly
def test_each_known_name_alone_is_in_one_list() -> None:
    for name in KNOWN:
        check_account(translate_arguments(["seed=1", f"{name}=1"]), {"seed", name})


def test_a_word_that_is_no_argument_is_named() -> None:
    text = translate_arguments(["trl", "sft", "--seed", "1", "--bf16=true", "stray", "~x"])
    assert {"#   stray: no argument", "#   ~x: no argument"} <= set(text.splitlines())
    assert text.rstrip().endswith(" 2 left for you to decide, 0 lost")
