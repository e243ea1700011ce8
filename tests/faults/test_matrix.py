"""A seeded sample of the crash matrix; `make faults` tries all of it."""

from __future__ import annotations

import random

import pytest
from crashes import cells, try_cell

SAMPLE = 14


def sample():
    """Some cells of every layout; a hang takes long and is left to the whole matrix."""
    found = [cell for cell in cells() if cell.fault != "hang"]
    return random.Random(20261121).sample(found, SAMPLE)


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_nothing_committed_is_lost(tmp_path, cell):
    assert try_cell(cell, tmp_path / "cell")
