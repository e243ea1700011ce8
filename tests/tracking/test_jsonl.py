import json
import math
import os
from pathlib import Path

import pytest
from contracts.tracker import STEPS, Record, RecordContract
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import CorruptError
from burnish.tracking.console import ConsoleTracker
from burnish.tracking.jsonl import (
    JsonlTracker,
    json_number,
    logged_values,
    number,
    read_metrics,
)
from burnish.tracking.trackers import Trackers


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
    back = number(json.loads(json.dumps(json_number(value), allow_nan=False)))
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
        with pytest.raises(CorruptError, match=r"metrics\.jsonl has a line"):
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
    tracker = Trackers([ConsoleTracker(total_steps=1), JsonlTracker(tmp_path / "metrics.jsonl")])
    synced.clear()
    tracker.log(1, {"loss": 1.0})
    tracker.sync()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]
    monkeypatch.undo()
    tracker.close()
