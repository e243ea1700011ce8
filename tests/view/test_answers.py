"""What the viewer says of a run besides its numbers: why it failed, what needs attention, one prompt through time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from support.runs.rollout_files import row, write
from view.served import Viewer, viewer

from burnish.config.document import dump_yaml
from burnish.config.schema import RunConfig
from burnish.tracking.rundir import RunDirectory

STEPS = (1, 10, 20, 30)


def make(path: Path, *, lr: float = 1e-6, state: str = "finished", steps: int = 30) -> RunDirectory:
    run = RunDirectory(path)
    settings: dict[str, Any] = {"name": path.name, "steps": 30, "optim": {"lr": lr}}
    run.config.parent.mkdir(parents=True)
    run.config.write_text(dump_yaml(RunConfig.model_validate(settings)))
    run.write_environment({"trainer": "rl", "started": "2026-01-01T10:00:00+00:00"})
    reason = {"problem": "no room", "have": None, "want": None, "do": "free some", "step": 3}
    run.write_status(30, state, reason if state == "failed" else None)
    lines = [
        {"step": step, "reward/mean": 0.1, "response_length/clip_ratio": 0.6, "timing_s/rollout": 2.0, "timing_s/step": 3.0}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    root = tmp_path_factory.mktemp("root")
    run = make(root / "a")
    make(root / "b", lr=1e-5, state="failed", steps=3)
    evaluation = make(root / "a" / "evaluations" / "1")
    evaluation.metrics.write_text('{"step": 30, "val/mean@1": 0.75, "val/reward": 0.5}\n')
    run.rollouts.mkdir()
    for step in STEPS:
        samples = [
            row(prompt, sample, step=step, reward=step / 100 + sample, completion="x" * 5000)
            for prompt in (0, 7)
            for sample in (0, 1)
        ]
        samples[3]["columns"] = {"level": "hard"}
        write(run.rollouts, step, samples)
    with viewer(root) as made:
        yield made


def test_the_list_says_why_a_run_failed_and_whose_evaluation_one_is(found: Viewer) -> None:
    rows = {each["run"]: each for each in found.get("runs")["runs"]}
    assert rows["a"]["reason"] is None
    assert (rows["b"]["state"], rows["b"]["reason"]["problem"]) == ("failed", "no room")
    assert rows["b"]["ended"] > rows["b"]["started"]
    child = rows["a/evaluations/1"]
    assert (child["parent"], child["score"]) == ("a", {"name": "val/mean@1", "value": 0.75})
    assert rows["a"]["parent"] is rows["a"]["score"] is None
    assert found.get("log", run="b")["reason"]["do"] == "free some"


def test_what_needs_attention_has_a_setting_of_the_run(found: Viewer) -> None:
    (item,) = found.get("attention", run="a")["items"]
    limit = RunConfig().rollout.max_response_length
    assert item["setting"] == f"rollout.max_response_length={2 * limit}"
    assert item["metric"] == "response_length/clip_ratio"
    rows = {each["run"]: each for each in found.get("runs")["runs"]}
    assert (rows["a"]["attention"], rows["b"]["attention"]) == (1, 0)
    assert found.get("attention", run="b")["items"] == []


def test_a_prompt_through_time(found: Viewer) -> None:
    whole = found.get("prompt", run="a", prompt=7)
    assert [each["step"] for each in whole["steps"]] == sorted(STEPS, reverse=True)
    assert (whole["total"], whole["next"]) == (len(STEPS), None)
    newest = whole["steps"][0]
    assert newest["mean"] == pytest.approx(0.3 + 0.5)
    assert [each["sample"] for each in newest["samples"]] == [0, 1]
    assert all(each["cut"] and len(each["completion"]) == 4000 for each in newest["samples"])
    sample = newest["samples"][1]
    rollout = found.get("rollout", run="a", id=sample["id"])
    assert (rollout["prompt_index"], rollout["step"], rollout["sample"]) == (7, 30, 1)
    assert whole["prompt"] == rollout["prompt"]
    first = found.get("prompt", run="a", prompt=7, limit=3)
    rest = found.get("prompt", run="a", prompt=7, cursor=first["next"])
    assert first["steps"] + rest["steps"] == whole["steps"]
    assert found.get("prompt", run="a", prompt=99)["steps"] == []
    assert found.get("prompt", run="b", prompt=0)["total"] == 0


def test_a_rollout_has_the_columns_that_its_group_has(found: Viewer) -> None:
    for prompt, columns in ((0, {}), (7, {"level": "hard"})):
        for sample in found.get("prompt", run="a", prompt=prompt)["steps"][0]["samples"]:
            assert found.get("rollout", run="a", id=sample["id"])["columns"] == columns


def test_steps_without_rollouts_are_said(found: Viewer) -> None:
    written = found.get("facets", run="a")["written"]
    assert (written["steps"], written["of"]) == (4, 30)
    assert "1, 10, 20, 30" in written["text"]
    assert found.get("facets", run="b")["written"] is None


def test_runs_that_are_compared_have_their_differences_and_steps_their_phases(
    found: Viewer,
) -> None:
    config = found.get("config", run=["a", "b"])
    assert config["differences"] == [{"setting": "optim.lr", "values": [1e-6, 1e-5]}]
    assert set(config["different"]) == {"name", "optim.lr"}
    recent = found.get("timeline", run="a", step=30)["recent"]
    assert recent["steps"] == list(range(11, 31))
    assert {each["name"]: each["seconds"][-1] for each in recent["phases"]} == {"rollout": 2.0}
