"""Seeded hostile inputs; more of them by night."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from door.fuzz import GENERATORS, complaints


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", GENERATORS)
def test_hostile_inputs_end_in_a_sentence(name: str) -> None:
    assert list(complaints(name, range(GENERATORS[name].inputs))) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
def test_many_hostile_inputs_end_in_a_sentence(name: str) -> None:
    assert list(complaints(name, range(1000, 1000 + GENERATORS[name].nightly))) == []
