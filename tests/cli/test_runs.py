"""Lists of runs, and two beside each other."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from support.runs.training_files import done, make_files

from burnish.cli.main import main
from burnish.config.document import dump_yaml
from burnish.config.schema import RunConfig
from burnish.files.lease import LEASE, holding_lease
from burnish.tracking.rundir import RunDirectory
from burnish.view.answers import Answers, Query
from burnish.view.runs import is_run_at
from burnish.view.server import _json


def make(name: str, rows: list[dict[str, float]], **settings: Any) -> Path:
    run = Path("runs", name)
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / LEASE).touch()
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
    assert states == ["finished", "running", "failed", "failed", "unreadable", "failed"]
    assert "metrics.jsonl" in found["runs/broken"]["reason"]["problem"]
    rl, sft = found["runs/rl"], found["runs/sft"]
    assert (rl["step"], rl["of"]) == (4, 4)
    assert rl["last"]["reward/mean"] == {"value": 1.0, "step": 4}
    assert rl["best"] == {"name": "val/reward", "value": 0.875, "step": 1}
    assert sft["last"]["train/loss"] == {"value": 2.5, "step": 1}
    assert sft["best"] == {"name": "val/loss", "value": 3.0, "step": 1}
    assert found["runs/sweep/again"]["reason"]["problem"]
    assert Path(rl["directory"]).samefile("runs/rl")
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "runs/sweep/again" in shown
    assert found["runs/sweep/again"]["reason"]["problem"] in shown


def test_evaluations_stand_below_their_run(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("rl/evaluations/1", [{"step": 4, "val/mean@1": 0.5, "val/reward": 0.25}])
    make("evaluations/1", [{"step": 4, "val/reward": 0.25}])  # of no run
    rows = as_json(capsys)["runs"]
    at = [row["run"] for row in rows].index("runs/rl")
    assert rows[at + 1]["run"] == "runs/rl/evaluations/1"
    assert rows[at + 1]["parent"] == "runs/rl"
    assert rows[at + 1]["score"] == {"name": "val/mean@1", "value": 0.5}
    assert [row["parent"] for row in rows].count(None) == len(rows) - 1


def test_a_copy_of_a_configuration_is_no_run(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts = make("mlruns/1/artifacts", [])
    (artifacts / "metrics.jsonl").unlink()
    (artifacts / "status.json").unlink()
    bare = make("bare", [])
    (bare / "environment.json").unlink()
    found = {row["run"] for row in as_json(capsys)["runs"]}
    assert "runs/bare" in found
    assert not any("mlruns" in run for run in found)


_CONTENTS = st.one_of(
    st.none(),
    st.binary(max_size=200),
    st.recursive(st.none() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"{" * 9999, b"[]", b"\xff\xfe", b"null\n" * 3, b'{"step": 1e400}\n', b'{"step": 99999999999999999999}\n', b'{"step": 1, "val/loss": [1]}\n', b'{"state": "failed", "reason": {"problem": null}}', b'{"steps": {}, "state": []}', b'{"started": 5, "host": []}', b"model:\n  path: [1]\nsteps: no\n"]),
)  # fmt: skip
_FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "logs/rank-0.log", "checkpoints/.lease")  # fmt: skip


@given(st.dictionaries(st.sampled_from(_FILES), _CONTENTS))
@draws(40)
def test_whatever_a_run_holds_the_others_are_listed(files: dict[str, bytes | None]) -> None:
    with TemporaryDirectory() as place, contextlib.chdir(place):
        make("good", [{"step": 1, "reward/mean": 0.5}])
        bad = make("bad", [])
        (bad / "logs").mkdir()
        for name, content in files.items():
            path = bad / name
            path.unlink(missing_ok=True)
            if content is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main(["runs", "--json"]) == 0
        rows = {row["run"]: row for row in json.loads(said.getvalue())["runs"]}
        assert rows["runs/good"]["last"]["reward/mean"]["value"] == 0.5
        answers = Answers(Path("runs"))
        found = {row["run"]: row for row in json.loads(_json(answers.runs(Query())).body)["runs"]}
        assert found["good"]["reward"] == 0.5
        assert found.keys() >= {"good"}
        if is_run_at(bad):
            assert "bad" in found
            assert "runs/bad" in rows
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["runs"]) == 0


def test_two_are_compared(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = "runs/rl", "runs/sweep/again"
    found = as_json(capsys, "compare", a, b)
    assert main(["runs", "compare", "--json", a, b]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["runs", "--json", "compare", a, b]) == 0
    assert json.loads(capsys.readouterr().out) == found
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
        (["compare"], 2),
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
