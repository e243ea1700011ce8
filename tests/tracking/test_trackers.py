from collections.abc import Mapping
from pathlib import Path

import pytest

from burnish.tracking.jsonl import read_metrics
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import Trackers, open_trackers


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


def test_a_main_rank_logs_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    trackers = open_trackers(run, main=True, total_steps=2)
    trackers.log(1, {"actor/loss": 2.0})
    trackers.close()
    assert read_metrics(run.metrics) == [{"step": 1, "actor/loss": 2.0}]
    assert len(list(run.tensorboard.iterdir())) == 1
    assert capsys.readouterr().out == "step 1/2  loss  2.000\n"


def test_other_ranks_touch_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = open_trackers(RunDirectory(tmp_path / "run"), main=False)
    trackers.log(1, {"actor/loss": 2.0})
    trackers.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_tensorboard_is_a_choice(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    open_trackers(run, main=True, tensorboard=False).close()
    assert not run.tensorboard.exists()
