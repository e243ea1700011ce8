"""The slowest rank is named once, after three steps in a row."""

from __future__ import annotations

import logging

from burnish.runs.stragglers import Stragglers


def _of_steps(seconds: list[list[float]], caplog, *, warns: bool = True) -> list[str]:
    """The warnings of steps in which each rank takes so long."""
    stragglers = Stragglers(warns=warns)
    with caplog.at_level(logging.WARNING):
        for by_rank in seconds:
            stragglers.update({"generate": [each / 2 for each in by_rank]})
            stragglers.update({"generate": [each / 2 for each in by_rank]})
            stats = stragglers.stats().values_by_name()
            assert stats["perf/slowest_rank/generate"] == by_rank.index(max(by_rank))
    return [record.getMessage() for record in caplog.records]


def test_three_times_in_a_row_are_said_once(caplog):
    said = _of_steps([[2, 2, 8, 2]] * 7, caplog)
    assert len(said) == 1
    assert said[0].startswith("rank 2 is the slowest to generate in 3 steps in a row: 8.0 s")


def test_what_changes_or_is_short_is_not_said(caplog):
    turns = [[2, 2, 8, 2], [2, 2, 8, 2], [8, 2, 2, 2]]
    assert _of_steps(turns * 2, caplog) == []
    assert _of_steps([[0.2, 0.2, 0.8, 0.2]] * 4, caplog) == []
    assert _of_steps([[8, 8, 9.5, 8]] * 4, caplog) == []
    assert _of_steps([[2, 2, 8, 2]] * 4, caplog, warns=False) == []


def test_the_share_is_of_the_median(caplog):
    stragglers = Stragglers(warns=True)
    stragglers.update({"score": [1.0, 4.0, 2.0]})
    assert stragglers.stats().values_by_name() == {
        "perf/slowest_rank/score": 1.0,
        "perf/slowest_share/score": 2.0,
    }
    assert stragglers.stats() == {}
