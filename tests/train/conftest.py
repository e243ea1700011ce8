from __future__ import annotations

import pytest
from support.runs.training_files import make_files


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with data and configurations, in which a module's tests give their runs names."""
    return make_files(tmp_path_factory.mktemp("work"))


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch):
    """A run in this process measures its processor for half a second, which no test is about."""
    monkeypatch.setattr("burnish.distributed.device._MATMUL_SIZES", (8,))
