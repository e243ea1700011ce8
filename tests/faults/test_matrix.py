"""A seeded sample of the crash matrix; `make faults` tries all of it."""

from __future__ import annotations

import random

import pytest
from crashes import LAYOUTS, cells, try_cell
from failpoints import EXPORTING, RESUMING

EACH = {"1 process": 3, "2 processes": 3}
"""Cells of saving, by layout; 2 of the others, which take longer."""


def sample():
    """Some cells of every layout and of resuming and exporting; a hang takes long and is left to the whole matrix."""
    rng = random.Random(20261121)
    found = [cell for cell in cells() if cell.fault != "hang"]
    other = RESUMING | EXPORTING
    for layout in LAYOUTS:
        saving = [c for c in found if c.layout == layout and c.moment not in other]
        yield from rng.sample(saving, EACH.get(layout, 2))
    yield from rng.sample([cell for cell in found if cell.moment in other], 5)


@pytest.mark.parametrize("cell", list(sample()), ids=str)
def test_nothing_committed_is_lost(tmp_path, cell):
    verdict = try_cell(cell, tmp_path / "cell")
    assert verdict.is_good, verdict
    assert verdict.struck
