"""A seeded sample of the crash matrix, of every moment, fault and layout; `make faults` tries all of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.checkpoints.engine_states import RESUMED_BY
from support.faults.crashes import LAYOUTS, Cell, cells, try_cell
from support.faults.failpoints import FAULTS, MOMENTS, STAGING

HANG = Cell("at half of the blocks", "hang", "2 + writers")
"""A hang takes long, so there is one."""
WITH_WRITERS = 4
"""As often as these come cells without: a writer imports torch, and is started again after most faults."""


def sample():
    """A cell of every moment, with those faults and layouts that came least; then one of each engine's layouts, from which the other engine goes on."""
    rng, used = random.Random(20261122), Counter()
    found = [cell for cell in cells() if cell.fault != "hang"]
    rng.shuffle(found)
    small = [cell for cell in found if cell.layout not in RESUMED_BY]
    chosen = [HANG]
    groups = [[cell for cell in small if cell.moment == moment] for moment in (*MOMENTS, STAGING)]
    groups += [[cell for cell in found if cell.layout == layout] for layout in RESUMED_BY]
    for group in groups:
        cell = min(group, key=lambda cell: used[cell.fault] + used[cell.layout])
        used[cell.fault] += 1
        used[cell.layout] += WITH_WRITERS if LAYOUTS[cell.layout][1] else 1
        chosen.append(cell)
    return chosen


def test_the_sample_has_some_of_everything():
    chosen = sample()
    assert {cell.moment for cell in chosen} == {*MOMENTS, STAGING}
    assert {cell.fault for cell in chosen} == set(FAULTS)
    assert {cell.layout for cell in chosen} == set(LAYOUTS)
    assert set(chosen) <= set(cells())


def marked(number, cell):
    """Every third of the sample by day, the others by night."""
    marks = () if number % 3 == 1 else pytest.mark.nightly
    return pytest.param(cell, id=str(cell), marks=marks)


@pytest.mark.parametrize("cell", [marked(*each) for each in enumerate(sample())])
def test_nothing_committed_is_lost(tmp_path, cell):
    verdict = try_cell(cell, tmp_path / "cell")
    assert verdict.is_good, verdict
    assert verdict.struck
