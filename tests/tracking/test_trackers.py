import html
import json
import math
import os
import re
import resource
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from contracts.tracker import ROWS, STEPS, Record, RecordContract, same_record
from hypothesis import given
from hypothesis import strategies as st
from support.ranks.processes import run_processes
from support.runs.rollouts import made_rollout, table_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from burnish.config.schema import TrackingConfig
from burnish.errors import CorruptError, UsageError
from burnish.extend import TRACKERS
from burnish.records import Rollout
from burnish.tracking.observers import Observers, wanted_rollouts
from burnish.tracking.rollouts import rollout_files, sample_table
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.tensorboard import TensorBoardTracker
from burnish.tracking.trackers import (
    BackgroundTracker,
    JsonlTracker,
    json_numbers,
    load_tracker,
    logged_values,
    numbers,
    read_metrics,
)

NOTED = """
class Noted:
    def __init__(self, directory):
        self.path = directory / "noted.txt"
    def note(self, *words):
        with self.path.open("a") as file:
            print(*words, file=file)
    def log(self, step, values):
        self.note("log", step, dict(values))
    def sync(self):
        self.note("sync")
    def close(self):
        self.note("close")

class Failing(Noted):
    def log(self, step, values):
        raise OSError("disk full")
    def sync(self):
        raise OSError("disk full")
    def close(self):
        raise RuntimeError("gone")

class Unborn(Noted):
    def __init__(self, directory):
        raise OSError("no such service")

class Sampled(Noted):
    def __init__(self, directory):
        self.path = directory / "sampled.txt"
    def log(self, step, values):
        pass
    def sync(self):
        pass
    def close(self):
        pass
    def log_rollouts(self, step, kind, rows):
        self.note(step, kind, [row["completion"] for row in rows])
    def log_file(self, path, kind):
        self.note("file", kind)
    def end(self, state):
        self.note("end", state)

class Mute:
    def __init__(self, directory):
        pass

class Choosy(Noted):
    def __init__(self):
        pass
"""


def observers(
    tmp_path: Path,
    names: str = "tensorboard Noted",
    *,
    step: int = 0,
    is_logged: bool = True,
    **settings: Any,
) -> tuple[RunDirectory, Observers]:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine.py").write_text(NOTED)
    mine = f"{tmp_path / 'mine.py'}:"
    trackers = [name if name in TRACKERS.builtins else mine + name for name in names.split()]
    config = TrackingConfig(trackers=trackers, **settings)
    return run, Observers(run, config, step=step, total_steps=7, is_logged=is_logged)


def test_all_hear_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, told = observers(tmp_path)
    told.step_finished(1, {"train/loss": 2.0})
    told.sync()
    told.report("finished")
    told.close()
    assert capsys.readouterr().out == "step 1/7  loss   2.000\n"
    assert read_metrics(run.metrics) == [{"step": 1, "train/loss": 2.0}]
    assert len(list(run.tensorboard.iterdir())) == 1
    assert '"state":"finished"' in run.report.read_text("utf-8")
    noted = (run.root / "noted.txt").read_text().splitlines()
    assert (noted[0], noted[1], noted[-1]) == ("log 1 {'train/loss': 2.0}", "sync", "close")


def test_a_failing_tracker_stops_no_run_and_no_other_tracker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, told = observers(tmp_path, "Noted Failing Unborn", report=False)
    for step in (1, 2):
        told.step_finished(step, {})
        told.sync()
    told.close()
    noted = (run.root / "noted.txt").read_text().splitlines()
    assert noted.count("log 1 {}") == noted.count("log 2 {}") == noted.count("close") == 1
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2]
    warnings = [each.message for each in caplog.records]
    assert sum("Failing" in each for each in warnings) == 2, "one warning, and what is lost"
    assert sum("Unborn" in each for each in warnings) == 2


class Slow:
    """A tracker whose calls wait until they may go on."""

    def __init__(self, directory: Path) -> None:
        self.may_go_on = threading.Event()
        self.steps: list[int] = []

    def log(self, step: int, values: Any) -> None:
        assert self.may_go_on.wait(60)
        self.steps.append(step)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_tracker_that_hangs_is_left_behind_and_its_loss_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(tmp_path)
    tracker = BackgroundTracker("slow", lambda directory: slow, tmp_path, room={"log": 3})
    for step in range(1, 8):  # none of which waits
        tracker.log(step, {})
    tracker.finish("finished", time.monotonic() + 0.1)
    tracker.close()
    assert [each.args[1] for each in caplog.records if "lost" in each.message] == [4 + 3]
    assert len(caplog.records) == 2
    slow.may_go_on.set()


def test_a_slow_tracker_gets_what_there_is_room_for_in_order(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    tracker = BackgroundTracker("slow", lambda directory: slow, tmp_path, room={"log": 3})
    for step in range(1, 8):
        tracker.log(step, {})
    slow.may_go_on.set()
    tracker.close()
    assert slow.steps == [1, 2, 3]


def test_what_a_failing_sync_held_is_lost_and_comes_again_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unsynced(Slow):
        def sync(self) -> None:
            raise OSError("away")

    steps = []
    for make in (Unsynced, Slow):
        slow = make(tmp_path)
        slow.may_go_on.set()
        tracker = BackgroundTracker("slow", lambda directory, made=slow: made, tmp_path)
        for step in (1, 2):
            tracker.log(step, {})
            tracker.tell("log_traces", step, [])  # no method of it, so no call
        tracker.close()
        steps.append(slow.steps)
    assert steps == [[1, 2], [1, 2]]
    assert [each.args[1] for each in caplog.records if "lost" in each.message] == [2]


def score(told: Observers, step: int, rollouts: list[Rollout], means: list[float] | None) -> None:
    told.rollouts_scored(
        step, table_of(rollouts), means, {}, enumerate(rollouts), range(len(rollouts))
    )


@pytest.mark.nightly
def test_each_step_comes_once_in_the_life_of_a_run(tmp_path: Path) -> None:
    for step in (0, 2):
        run, told = observers(tmp_path, "Noted Sampled", step=step, rollouts_every=1)
        for each in (1, 2, 3, 4)[step : step + 3]:
            score(told, each, [made_rollout()], [0.5])
            told.step_finished(each, {})
        told.checkpoint_committed("/there")
        told.report("stopped")
        told.close()
    noted = (run.root / "noted.txt").read_text().splitlines()
    assert [line for line in noted if line.startswith("log")] == [
        f"log {n} {{}}" for n in range(1, 5)
    ]
    assert (run.root / "sampled.txt").read_text().splitlines() == [
        *(f"{n} step ['4']" for n in (1, 2, 3)),
        "file checkpoint",
        "file report",
        "end stopped",
        "4 step ['4']",
        "file checkpoint",
        "file report",
        "end stopped",
    ]


def test_trackers_get_the_rollouts_that_are_kept_longest(tmp_path: Path) -> None:
    run, told = observers(tmp_path, "Sampled", rollouts_every=1)
    rollouts = [made_rollout(i, text=str(i), reward=i) for i in range(100)]
    score(told, 1, rollouts, [0.0] * 100)
    told.close()
    noted = (run.root / "sampled.txt").read_text().splitlines()[0]
    samples = re.findall(r"'(\d+)'", noted)
    assert len(samples) == 16
    assert {"0", "1", "2", "3", "96", "97", "98", "99"} < set(samples)


@pytest.mark.parametrize("name", ["Mute", "Choosy", "tensorbord", "missing"])
def test_what_cannot_be_a_tracker_is_refused_before_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(NOTED)
    with pytest.raises(UsageError):
        load_tracker(name if name == "tensorbord" else f"{tmp_path / 'mine.py'}:{name}")


def test_rollouts_are_written_where_they_are_due(tmp_path: Path) -> None:
    for every, wanted in (("auto", [*range(1, 8)]), (3, [1, 3, 6, 7]), (0, [])):
        run, told = observers(tmp_path / str(every), rollouts_every=every)
        for step in range(1, 8):
            score(told, step, [made_rollout()], [0.5])
        score(told, 2, [made_rollout()], None)
        told.close()
        assert [step for step, _ in rollout_files(run.rollouts)] == wanted
        assert [step for step, _ in rollout_files(run.rollouts, "validation")] == [2] * (every != 0)
    run, told = observers(tmp_path / "3", step=3)
    told.close()
    assert [step for step, _ in rollout_files(run.rollouts)] == [1, 3]


def test_a_long_run_writes_every_tenth_step() -> None:
    settings = TrackingConfig.model_validate({"traces": {"local": False}})
    table = table_of([made_rollout()])
    for total, wanted in ((49, [*range(1, 50)]), (52, [1, 10, 20, 30, 40, 50, 52])):
        steps = range(1, total + 1)
        due = [n for n in steps if wanted_rollouts(settings, n, total, table, False) is not None]
        assert due == wanted


def test_a_run_goes_on_after_the_last_line_that_it_logged(tmp_path: Path) -> None:
    for is_logged, step, kept in ((True, 2, [1, 2]), (False, 2, [1]), (True, 0, [])):
        run, told = observers(tmp_path)
        for each in (1, 2, 3):
            told.step_finished(each, {})
        told.close()
        _, told = observers(tmp_path, step=step, is_logged=is_logged)
        told.close()
        assert [row["step"] for row in read_metrics(run.metrics)] == kept


class TestJsonlTracker(RecordContract):
    def open(self, directory: Path, resume_step: int | None = None) -> JsonlTracker:
        return JsonlTracker(directory / "metrics.jsonl", resume_step=resume_step)

    def read(self, directory: Path) -> Record:
        rows = read_metrics(directory / "metrics.jsonl")
        return {int(row["step"]): {k: v for k, v in row.items() if k != "step"} for row in rows}

    def test_the_file_of_an_interrupted_run_is_the_same_to_the_byte(self, tmp_path: Path) -> None:
        self.log(tmp_path, [0, 1, 2, 3])
        whole = (tmp_path / "metrics.jsonl").read_bytes()
        (tmp_path / "metrics.jsonl").write_bytes(whole[:-5])  # killed within the last line
        self.log(tmp_path, [2, 3], resume_step=1)
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole

    def test_a_line_is_there_as_soon_as_it_is_logged(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        tracker.log(1, STEPS[1])
        same_record(self.read(tmp_path), {1: STEPS[1]})
        tracker.close()

    def test_every_line_is_plain_json(self, tmp_path: Path) -> None:
        self.log(tmp_path, [0, 1, 2, 3])
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        refuse = {"parse_constant": lambda name: pytest.fail(f"{name} is not JSON")}
        assert [json.loads(line, **refuse)["step"] for line in lines] == list(STEPS)
        assert lines[1] == '{"step": 1, "reward/mean": 0.5, "actor/grad_norm": "NaN"}'

    def test_an_interrupted_cut_leaves_no_other_file(self, tmp_path: Path) -> None:
        self.log(tmp_path, [0, 1, 2, 3])
        self.log(tmp_path, [], resume_step=1)
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@given(st.floats())
def test_numbers_survive_json(value: float) -> None:
    (back,) = numbers(json.loads(json.dumps(json_numbers({"x": value}), allow_nan=False))).values()
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_reading_leaves_out_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2}\n\n{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 1, "a": 2}]


def test_no_file_is_no_steps(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["{broken", '{"loss": 1}', "[1]", '{"step": "x"}', "\xff"])
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 1}}\n', encoding="latin-1")
    for use in (lambda: read_metrics(path), lambda: JsonlTracker(path, resume_step=1)):
        with pytest.raises(CorruptError, match=r"metrics\.jsonl"):
            use()


def test_what_is_said_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert logged_values(path, 0) == {}
    path.write_text('{"step": 0, "a": 1}\n{"step": 1, "a": "NaN", "b": 2.5}\n{"step": 2, "a')
    assert logged_values(path, 0) == {"a": 1.0}
    assert logged_values(path, 2) == {}
    found = logged_values(path, 1)
    assert math.isnan(found.pop("a"))
    assert found == {"b": 2.5}


def test_syncing_forces_what_was_logged_to_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    synced.clear()
    tracker.log(1, {"loss": 1.0})
    tracker.sync()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]
    monkeypatch.undo()
    tracker.close()


def _logs_where_a_file_may_not_grow(directory: Path) -> None:
    """As on a full disk, until there is room again."""
    os.dup2(os.open(directory / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    tracker = BackgroundTracker("tensorboard", TensorBoardTracker, directory)
    for step in range(100):
        tracker.log(step, {"loss": float(step)})
    tracker.sync()
    while not tracker._warned:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    tracker.log(100, {"loss": 100.0})
    tracker.close()


def test_a_full_disk_is_one_sentence_and_breaks_no_record(tmp_path: Path) -> None:
    run_processes(_logs_where_a_file_may_not_grow, [{}], tmp_path)
    warning, lost = (tmp_path / "stderr").read_text().splitlines()
    assert "OSError" in warning
    assert "lost" in lost
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [each.value for each in events.Scalars("loss")] == [*range(101)]


class TestTensorBoardTracker(RecordContract):
    def open(self, directory: Path, resume_step: int | None = None) -> TensorBoardTracker:
        return TensorBoardTracker(directory, resume_step=resume_step)

    def read(self, directory: Path) -> Record:
        """As TensorBoard itself reads the files."""
        events = EventAccumulator(str(directory / "tensorboard"))
        events.Reload()
        record: Record = {}
        for name in events.Tags()["scalars"]:
            for scalar in events.Scalars(name):
                record.setdefault(scalar.step, {})[name] = scalar.value
        return record

    def test_a_sample_without_a_reward_keeps_its_column_a_number(self) -> None:
        """A table of W&B refuses a column of numbers and texts."""
        dropped, kept = sample_table([{**ROWS[0], "reward": "NaN"}, {**ROWS[0], "reward": 0.5}])
        assert (dropped["reward"], kept["reward"]) == (None, 0.5)

    def test_samples_are_texts_that_are_only_shown(self, tmp_path: Path) -> None:
        tracker = self.open(tmp_path)
        hostile = "<script>alert(1)</script> | **bold**\n[x](javascript:y)"
        tracker.log_rollouts(3, "step", [{**ROWS[0], "completion": hostile}])
        tracker.log_rollouts(4, "validation", [])
        tracker.close()
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        (text,) = events.Tensors("rollouts/step/text_summary")
        (written,) = text.tensor_proto.string_val
        with warnings.catch_warnings():  # bleach's own
            warnings.simplefilter("ignore")
            from tensorboard.plugin_util import markdowns_to_safe_html
        page = markdowns_to_safe_html([written], lambda texts: texts[0])
        assert text.step == 3
        assert "<script" not in page
        assert "<strong>" not in page
        assert "<a " not in page
        for said in ("alert(1)", "**bold**", "[x](javascript:y)", "2+2="):
            assert said in html.unescape(page)
