"""What the table of `make faults` says, and that it cannot say "ok" of what was not tried."""

from __future__ import annotations

from support.faults.campaigns import Tally
from support.faults.failpoints import FAULTS, SAVING
from support.faults.verdict import Verdict

FIRST, SECOND, *_ = SAVING


def row(tally, moment):
    """The cells of a moment's line, by the names of their columns."""
    head, *lines = tally.rows()
    names = [head[start : start + 14].strip() for start in range(42, len(head), 14)]
    line = next(line for line in lines if line.startswith(moment))
    cells = [line[start : start + 14].strip() for start in range(42, len(line), 14)]
    return dict(zip(names, cells, strict=True))


def test_runs_are_counted_by_moment_and_fault():
    tally = Tally()
    for fault in (FAULTS[0], FAULTS[0], FAULTS[1]):
        tally.add(FIRST, fault, "a cell", Verdict())
    found = row(tally, FIRST)
    assert (found[FAULTS[0]], found[FAULTS[1]], found[FAULTS[2]]) == ("2", "1", "-")
    assert (found["missed"], found["verdict"]) == ("0", "ok")
    assert tally.words == []


def test_a_fault_that_did_not_come_is_wrong():
    tally = Tally()
    tally.add(FIRST, FAULTS[0], "one cell", Verdict())
    tally.add(FIRST, FAULTS[0], "another cell", Verdict(struck=False))
    tally.add(SECOND, FAULTS[0], "a third", Verdict(struck=False, wrong="no first save"))
    assert row(tally, FIRST)[FAULTS[0]] == row(tally, FIRST)["missed"] == "1"
    assert row(tally, FIRST)["verdict"] == row(tally, SECOND)["verdict"] == "WRONG"
    assert row(tally, "all")["missed"] == row(tally, "all")["verdict"] == "2"
    first, second = tally.words
    assert first.startswith("another cell: the fault did not come")
    assert second.startswith("a third: the fault did not come")
    assert second.endswith("no first save")


def test_what_was_not_tried_has_no_verdict():
    tally = Tally()
    tally.add(FIRST, FAULTS[0], "a cell", Verdict())
    assert row(tally, SECOND)["verdict"] == "-"


def test_what_is_lost_or_loaded_is_wrong():
    tally = Tally()
    tally.add(FIRST, FAULTS[0], "a cell", Verdict(lost=2, wrong="gone"))
    tally.add(SECOND, FAULTS[0], "a cell", Verdict(uncommitted=1, wrong="half"))
    assert (row(tally, FIRST)["lost"], row(tally, FIRST)["verdict"]) == ("2", "WRONG")
    assert (row(tally, SECOND)["uncommitted"], row(tally, SECOND)["verdict"]) == ("1", "WRONG")
    assert tally.words == ["a cell: gone", "a cell: half"]
