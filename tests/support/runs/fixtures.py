"""Fixtures of the folders that train; their conftest.py imports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs.training_files import make_files


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data and configurations, in which a module's tests give their runs names."""
    return make_files(tmp_path_factory.mktemp("work"))


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process measures its processor for half a second, which no test is about."""
    monkeypatch.setattr("burnish.distributed.device._MATMUL_SIZES", (8,))
