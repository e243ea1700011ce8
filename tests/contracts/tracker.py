"""What every tracker does, and what every tracker that keeps a record does on resuming."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from burnish.tracking.trackers import Tracker

Record = dict[int, dict[str, float]]

STEPS: Record = {
    0: {"val/mean@1": 0.25},
    1: {"reward/mean": 0.5, "actor/grad_norm": math.nan},
    2: {"reward/mean": 0.75, "actor/grad_norm": math.inf, "actor/lr": 1e-6},
    3: {"reward/mean": 1.0, "actor/pg_loss": -math.inf, "val/mean@1": 0.5},
}


class TrackerContract:
    """Subclasses open a tracker on a directory, as a run does at its start or on resuming."""

    def open(self, directory: Path, resume_step: int | None = None) -> Tracker:
        raise NotImplementedError

    def test_takes_what_a_run_logs_without_a_warning(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tracker = self.open(tmp_path)
            for step, values in STEPS.items():
                tracker.log(step, values)
            tracker.log(4, {})
            tracker.close()

    def test_values_are_only_read(self, tmp_path: Path) -> None:
        values: Mapping[str, float] = {"actor/lr": 1e-6, "reward/mean": 0.5}
        before = dict(values)
        tracker = self.open(tmp_path)
        tracker.log(1, values)
        tracker.close()
        assert list(values.items()) == list(before.items())

    def test_closing_twice_is_closing_once(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        tracker.close()
        tracker.close()


class RecordContract(TrackerContract):
    """For trackers whose record can be read back."""

    def read(self, directory: Path) -> Record:
        raise NotImplementedError

    def log(self, directory: Path, steps: list[int], resume_step: int | None = None) -> None:
        tracker = self.open(directory, resume_step)
        for step in steps:
            tracker.log(step, STEPS[step])
        tracker.close()

    def test_what_was_logged_is_read_back(self, tmp_path: Path) -> None:
        self.log(tmp_path, [0, 1, 2, 3])
        same_record(self.read(tmp_path), STEPS)

    def test_a_step_is_there_as_soon_as_it_is_logged(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        tracker.log(1, STEPS[1])
        same_record(self.read(tmp_path), {1: STEPS[1]})
        tracker.close()

    @pytest.mark.parametrize("committed", [0, 1, 2, 3])
    def test_an_interrupted_record_equals_an_uninterrupted_one(
        self, tmp_path: Path, committed: int
    ) -> None:
        interrupted = self.open(tmp_path)
        for step in (0, 1, 2, 3):
            interrupted.log(
                step, dict.fromkeys(STEPS[step], 100.0) if step > committed else STEPS[step]
            )
        interrupted.close()
        self.log(tmp_path, [step for step in STEPS if step > committed], resume_step=committed)
        same_record(self.read(tmp_path), STEPS)

    def test_a_run_from_the_start_forgets_an_earlier_one(self, tmp_path: Path) -> None:
        self.log(tmp_path, [0, 1, 2, 3])
        self.log(tmp_path, [1])
        same_record(self.read(tmp_path), {1: STEPS[1]})


def same_record(found: Record, wanted: Record) -> None:
    """Equal to fp32, NaN equal to NaN."""
    assert found.keys() == wanted.keys()
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-6, nan_ok=True), step
