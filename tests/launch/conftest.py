from __future__ import annotations

import pytest
from support.runs.training_files import make_files


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with data and configurations, in which a module's tests give their runs names."""
    return make_files(tmp_path_factory.mktemp("work"))
