"""Seeded hostile inputs; more of them by night."""

from __future__ import annotations

import pytest
from door.fuzz import GENERATORS, complaints


@pytest.mark.parametrize("name", GENERATORS)
def test_hostile_inputs_end_in_a_sentence(name: str) -> None:
    assert list(complaints(name, range(GENERATORS[name].inputs))) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
def test_many_hostile_inputs_end_in_a_sentence(name: str) -> None:
    assert list(complaints(name, range(1000, 1000 + GENERATORS[name].nightly))) == []
