"""Machines that share no disk and die at a moment: nothing that the mirror has is lost, nothing that it has not is loaded."""

from __future__ import annotations

import pytest
from disk_crashes import prepare, try_moment
from nights import by_day


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("disks")
    prepare(directory)
    return directory


# `make faults` runs all others.
SAMPLE = [
    (0, "in the middle of a file"),
    (1, "all sent, before it says so"),
    (0, "all have said so, before the manifest"),
    (0, "before COMMIT"),
    (0, "COMMIT not read back"),
    (1, "all sealed, before its portion goes"),
]


@pytest.mark.parametrize(("disk", "moment"), by_day(SAMPLE, SAMPLE[2::2]))
def test_a_machine_that_dies_at_a_moment(prepared, tmp_path, disk, moment):
    goes_on = moment in (SAMPLE[0][1], SAMPLE[3][1])
    verdict = try_moment(prepared, tmp_path, disk, moment, goes_on=goes_on)
    assert verdict.struck, verdict
    assert verdict.is_good, verdict
