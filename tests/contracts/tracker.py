"""What every tracker does, and what every tracker that keeps a record does on resuming."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from burnish.config.document import dump_yaml
from burnish.config.schema import RunConfig
from burnish.tracking.conversation_text import conversation_text
from burnish.tracking.rundir import RUN, RunDirectory
from burnish.tracking.trackers import BackgroundTracker, Tracker, load_tracker

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

    def test_a_step_is_there_as_soon_as_it_is_synced(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        tracker.log(1, STEPS[1])
        tracker.sync()
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


ROWS = [
    {
        "step": 1,
        "prompt_index": 0,
        "sample": 0,
        "prompt": "2+2=",
        "completion": "four | <script>\n",
        "answer": "4",
        "reward": 0.5,
        "reward_parts": {"exact": 0.5},
        "advantage": -1.0,
        "stop_reason": "stop",
    }
]
TALK = {
    **ROWS[0],
    "end": "turns",
    "conversation": [
        {"role": "assistant", "content": "four | <script>\n", "rewards": {"called": 0.25},
         "calls": [{"name": "add", "arguments": {"a": 2, "b": [2]}}]},
        {"role": "tool", "name": "add", "content": "Error: \x1b[31mno\u202e", "is_error": True},
    ],
}  # fmt: skip
"""The row of a conversation."""


class ServiceContract(TrackerContract):
    """For built-in trackers that get each step once, in the background, and go on with the same run.

    `open` of a subclass is that of a run with configuration, environment and diff.
    """

    name: str

    @pytest.fixture(autouse=True)
    def _nothing_is_lost(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        yield
        assert [each.message for each in caplog.records if each.name == "burnish"] == []

    def open(self, directory: Path, resume_step: int | None = None) -> BackgroundTracker:
        run = RunDirectory(directory)
        if not run.config.exists():
            run.config.write_text(dump_yaml(RunConfig(seed=5)))
            run.write_environment({RUN: directory.name, "git_commit": "c0ffee"})
            run.diff.write_text("-old\n+new\n")
        return BackgroundTracker(self.name, load_tracker(self.name), directory)

    def read(self, directory: Path) -> list[tuple[int, dict[str, float]]]:
        """Every step as often as the service has it."""
        raise NotImplementedError

    def test_steps_lost_by_a_kill_are_not_logged_twice(self, tmp_path: Path) -> None:
        for steps in ([0, 1, 2], [2, 3]):
            tracker = self.open(tmp_path)
            for step in steps:
                tracker.log(step, STEPS[step])
            tracker.close()
        found = sorted(self.read(tmp_path), key=lambda row: row[0])
        assert [step for step, _ in found] == list(STEPS)
        same_record(dict(found), STEPS)

    def test_samples_settings_and_files_are_there(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        (tmp_path / "report.html").write_text("<p>report")
        step = tmp_path / "checkpoints" / "step-00000001"
        step.mkdir(parents=True)
        (step / "weights").write_text("x" * 1000)
        tracker.tell("log_rollouts", 1, "step", [TALK])
        tracker.log(1, STEPS[1])
        tracker.tell("log_file", str(step), "checkpoint")
        tracker.tell("log_file", str(tmp_path / "report.html"), "report")
        tracker.finish("finished", time.monotonic() + 60)
        tracker.close()
        assert same_sample(self.sample(tmp_path))
        assert self.setting(tmp_path, "seed") == "5"
        assert {"report.html", "config.yaml", "git.diff"} <= self.files(tmp_path)
        assert self.checkpoint(tmp_path).endswith("checkpoints/step-00000001")

    def sample(self, directory: Path) -> dict[str, object]:
        """The only row of the only table."""
        raise NotImplementedError

    def setting(self, directory: Path, name: str) -> str:
        raise NotImplementedError

    def files(self, directory: Path) -> set[str]:
        """Names of the files that the service has."""
        raise NotImplementedError

    def checkpoint(self, directory: Path) -> str:
        """Where the service says that the checkpoint is."""
        raise NotImplementedError


def same_sample(found: dict[str, object]) -> bool:
    wanted = {name: TALK[name] for name in ("prompt", "answer", "stop_reason", "end")}
    wanted["completion"] = conversation_text(TALK)
    numbers = {"step": 1, "reward": 0.5, "advantage": -1.0, "reward/exact": 0.5}
    assert {name: found[name] for name in wanted} == wanted
    assert {name: float(str(found[name])) for name in numbers} == numbers
    return True
