import io
from collections.abc import Mapping
from pathlib import Path

import pytest

from burnish.tracking.console import ConsoleTracker
from burnish.tracking.jsonl import JsonlTracker, read_metrics
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.tensorboard import TensorBoardTracker
from burnish.tracking.trackers import Tracker, Trackers


class Noted:
    """Keeps what it was told; closes with an error where asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._error = error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1
        if self._error:
            raise self._error


def test_every_tracker_is_told() -> None:
    one, two = Noted(), Noted()
    trackers = Trackers([one, two])
    trackers.log(3, {"a": 1.0})
    trackers.close()
    assert one.logged == two.logged == [(3, {"a": 1.0})]
    assert one.closed == two.closed == 1


def test_all_are_closed_where_one_fails() -> None:
    one, two = Noted(), Noted(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        Trackers([one, two]).close()
    assert one.closed == two.closed == 1


def test_a_rank_that_does_not_log_holds_none() -> None:
    trackers = Trackers()
    trackers.log(1, {"actor/loss": 2.0})
    trackers.close()


def test_the_sinks_of_a_run_together(tmp_path: Path) -> None:
    run, stream = RunDirectory(tmp_path / "run"), io.StringIO()
    run.create()
    sinks = [
        ConsoleTracker(stream=stream),
        JsonlTracker(run.metrics),
        TensorBoardTracker(run.tensorboard),
    ]
    trackers: Tracker = Trackers(sinks)
    trackers.log(1, {"train/loss": 2.0})
    trackers.close()
    assert stream.getvalue() == "step 1  loss   2.000\n"
    assert read_metrics(run.metrics) == [{"step": 1, "train/loss": 2.0}]
    assert len(list(run.tensorboard.iterdir())) == 1
