"""Seeded hostile inputs; more of them by night."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest
from support.fuzz.commands import GENERATORS, complaints


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@contextmanager
def unheard() -> Iterator[None]:
    """Keep logs from pytest: names that are not text are in them, which its workers cannot send."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


@pytest.mark.parametrize("name", GENERATORS)
def test_hostile_inputs_end_in_a_sentence(name: str) -> None:
    with unheard():
        found = list(complaints(name, range(GENERATORS[name].inputs // 4)))
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", GENERATORS)
def test_many_hostile_inputs_end_in_a_sentence(name: str) -> None:
    with unheard():
        found = list(complaints(name, range(1000, 1000 + GENERATORS[name].nightly)))
    assert not found, "\n".join(found)
