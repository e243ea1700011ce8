"""Lists of runs, and two beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs.training_files import done, make_files

from burnish.cli.main import main
from burnish.config.document import dump_yaml
from burnish.config.schema import RunConfig
from burnish.files.lease import LEASE, holding_lease
from burnish.tracking.rundir import RunDirectory


def make(name: str, rows: list[dict[str, float]], **settings: Any) -> Path:
    run = Path("runs", name)
    (run / "checkpoints").mkdir(parents=True)
    config = RunConfig.model_validate({"name": name, "steps": 4, **settings})
    (run / "config.yaml").write_text(dump_yaml(config))
    (run / "environment.json").write_text("{}")
    RunDirectory(run).write_status(4, "finished" if len(rows) == 4 else "running")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rewards = [{"step": n, "reward/mean": n / 4, "val/reward": 1 - n / 8} for n in range(1, 5)]
    make("rl", rewards, optim={"lr": 1e-6})
    make("sft", [{"step": 1, "train/loss": 2.5, "val/loss": 3.0}, {"step": 2, "train/loss": "NaN"}])  # type: ignore[dict-item]
    make("sweep/again", rewards[:2], optim={"lr": 1e-5})
    make("empty", [])
    make("broken", []).joinpath("metrics.jsonl").write_text("{\n{}\n")
    make("words", []).joinpath("config.yaml").write_text("no mapping")
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["runs", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holding_lease(Path("runs/sft/checkpoints") / LEASE):
        found = {row["run"]: row for row in as_json(capsys)["runs"]}
    assert list(found) == [
        f"runs/{n}" for n in ("rl", "sft", "sweep/again", "empty", "broken", "words")
    ]
    states = [row["state"] for row in found.values()]
    assert states[:4] == ["finished", "running", "failed", "failed"]
    assert "metrics.jsonl" in states[4]
    rl, sft = found["runs/rl"], found["runs/sft"]
    assert (rl["step"], rl["of"], rl["reward/mean"], rl["val/reward"]) == (4, 4, 1.0, 0.875)
    assert (sft["train/loss"], sft["val/loss"], sft["reward/mean"]) == (2.5, 3.0, None)
    assert main(["runs"]) == 0
    assert "runs/sweep/again" in capsys.readouterr().out


def test_two_are_compared(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = "runs/rl", "runs/sweep/again"
    found = as_json(capsys, "compare", a, b)
    settings = {row["setting"]: (row[a], row[b]) for row in found["settings"]}
    assert settings["optim.lr"] == ("1e-06", "1e-05")
    assert settings.keys() == {"name", "optim.lr"}
    rewards = [row for row in found["curves"] if row["metric"] == "reward/mean"]
    assert [(row["run"], row["curve"], row["last"]) for row in rewards] == [
        (a, "▁▃▅█", 1.0),
        (b, "▁▃", 0.5),
    ]
    assert main(["runs", "compare", a, b]) == 0
    assert "▁▃▅█" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["nowhere"], 5),
        (["a", "b"], 2),
        (["compare", "runs/rl"], 2),
        (["compare", "runs/rl", "runs"], 5),
        (["compare", "runs/rl", "runs/broken"], 3),
        (["compare", "runs/rl", "runs/words"], 3),
    ],
)  # fmt: skip
def test_mistakes(work: Path, argv: list[str], code: int) -> None:
    assert main(["runs", *argv]) == code


def test_a_run_by_epochs_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make_files(tmp_path)
    done(work, "sft", "sft.yaml", "steps=null", "epochs=1", "evaluation.every=0")
    monkeypatch.chdir(work)
    (row,) = as_json(capsys)["runs"]
    assert row["state"] == "finished"
    assert row["step"] == row["of"] > 1
