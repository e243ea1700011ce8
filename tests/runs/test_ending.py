"""A run that failed says so: in its status, in its report, in lists and at the next start. So does its mirror."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs.training_files import At, burnish, done, make_files, ranks

from burnish.cli.main import main
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.files.lease import LEASE
from burnish.methods.table import METHODS
from burnish.runs.ending import Ending, ending, last_failure, reason_of
from burnish.runs.session import open_run
from burnish.tracking.curves import Curves
from burnish.tracking.rundir import RunDirectory
from burnish.view.runs import describe

LOSS = """\
import os

from burnish.algorithms.policy_loss import ppo
from burnish.config.algorithm import PPOSettings

calls = [0]

def breaks(logprobs, micro_batch, algorithm):
    calls[0] += 1
    if calls[0] > 4 and os.environ.get("RANK", "1") == "1":
        raise ZeroDivisionError("a loss\\nof two lines")
    return ppo(logprobs, micro_batch, algorithm, PPOSettings())
"""
BREAKS = ["rl", "rl.yaml", "algorithm.policy_loss=loss.py:breaks", "evaluation.every=0"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_files(tmp_path_factory.mktemp("work"))
    (root / "loss.py").write_text(LOSS)
    return root


def described(work: Path, name: str) -> dict[str, Any]:
    run = RunDirectory(work / "runs" / name)
    return describe(run, Curves(run.metrics).refresh())


def test_an_error_in_a_step(work: Path) -> None:
    mirror = work / "mirror"
    argv = [*BREAKS, "name=loss", f"checkpoint.mirror={mirror.as_uri()}"]
    code, output = burnish(work, *argv)
    assert code == 2, output
    facts = described(work, "loss")
    assert facts["state"] == "failed", output
    assert "loss.py:breaks" in facts["reason"]["problem"]
    assert "ZeroDivisionError: a loss" in facts["reason"]["have"]
    assert facts["reason"]["step"] >= 1
    assert facts["ended"] >= facts["started"]
    run = RunDirectory(work / "runs" / "loss")
    assert "ZeroDivisionError: a loss" in run.report.read_text()
    assert json.loads((mirror / "loss" / "status.json").read_text()) == run.read_status()
    code, output = burnish(work, *argv)
    assert code == 2
    assert "the last attempt failed" in output
    done(work, "rl", "rl.yaml", "name=loss", "evaluation.every=0", "resume=fresh")
    assert described(work, "loss")["state"] == "finished"


def test_an_error_before_the_first_step(work: Path) -> None:
    code, _ = burnish(work, "rl", "rl.yaml", "name=reward", "reward.functions=rewards.py:raises")
    facts = described(work, "reward")
    assert code == 2
    assert (facts["state"], facts["reason"]["step"]) == ("failed", None)
    assert "no reward today" in facts["reason"]["have"]
    assert facts["reason"]["do"]


@pytest.mark.nightly
def test_an_error_of_another_rank_is_the_reason(work: Path) -> None:
    commands = ranks(work, [*BREAKS, "name=rank"], 2)
    assert [command.wait() for command in commands] == [1, 2]
    facts = described(work, "rank")
    assert facts["state"] == "failed"
    assert facts["reason"]["problem"].startswith("rank 1: algorithm.policy_loss")
    assert "ZeroDivisionError: a loss" in facts["reason"]["have"]


def test_a_lack_of_memory_is_the_reason(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: RunConfig, layout: Layout, device: torch.device, run_dir: object) -> None:
        with open_run(config, METHODS["sft"], layout, device) as session, session.spans("update"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.chdir(work)
    monkeypatch.setattr(METHODS["sft"], "run", run)
    argv = ["sft", "sft.yaml", "name=full"]
    assert main(argv) == 1
    facts = described(work, "full")
    assert facts["state"] == "failed"
    assert "memory" in facts["reason"]["problem"]
    assert "20.00 GiB" in facts["reason"]["have"]
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    listed = {each["run"]: each for each in json.loads(capsys.readouterr().out)["runs"]}
    assert listed["runs/full"]["reason"] == facts["reason"]
    assert main(["runs"]) == 0
    assert facts["reason"]["problem"] in capsys.readouterr().out
    assert main(argv) == 1
    assert facts["reason"]["problem"] in capsys.readouterr().err


def test_a_killed_process_has_failed_where_it_was(work: Path) -> None:
    at = At("burnish.runs.run:Run.finish", 2, signal.SIGKILL)
    code, _ = burnish(work, "sft", "sft.yaml", "name=killed", at=at)
    assert code == -signal.SIGKILL
    facts = described(work, "killed")
    assert (facts["state"], facts["reason"]["step"]) == ("failed", 2)
    assert "update" in facts["reason"]["problem"]
    failure = last_failure(RunDirectory(work / "runs" / "killed"))
    assert failure is not None
    assert "step 2" in failure
    assert described(work, "killed")["step"] == 1


def test_the_death_of_rank_0_is_told_by_rank_1(work: Path) -> None:
    at = At("burnish.runs.run:Run.finish", 2, signal.SIGKILL)
    commands = ranks(work, ["sft", "sft.yaml", "name=headless"], 2, at)
    assert commands[0].wait() == -signal.SIGKILL
    assert commands[1].wait() == 1
    status = RunDirectory(work / "runs" / "headless").read_status()
    assert status["state"] == "failed"
    assert "rank 0" in status["reason"]["problem"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_and_is_no_failure(work: Path, number: int) -> None:
    at = At("burnish.runs.run:Run.finish", 2, number)
    name = f"stopped-{number}"
    assert burnish(work, "sft", "sft.yaml", f"name={name}", at=at)[0] == 128 + number
    facts = described(work, name)
    assert (facts["state"], facts["reason"]) == ("stopped", None)
    assert facts["of"] == 6


def test_a_refused_start_leaves_the_state_as_it_is(work: Path) -> None:
    run = RunDirectory(done(work, "sft", "sft.yaml", "name=mine"))
    before = run.status.read_bytes()
    assert run.read_status()["state"] == "finished"
    assert burnish(work, "sft", "sft.yaml", "name=mine", "optim.lr=0.5")[0] == 4
    assert run.status.read_bytes() == before


def test_a_reason_has_no_credentials_and_one_first_line() -> None:
    problem = "s3://me:secret@bucket is not there"
    reason = reason_of(UsageError(problem, have="api_key=abcdefgh", do="look"))
    assert "secret" not in json.dumps(reason)
    assert "abcdefgh" not in json.dumps(reason)
    assert reason_of(KeyError())["problem"] == "KeyError: no text"


def test_a_copy_that_nobody_writes_is_silent(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_status(3, "running")
    assert ending(run) == Ending("running")
    os.utime(run.status, (1e9, 1e9))
    state, reason, ended = ending(run)
    assert (state, reason, ended) == ("silent", None, "2001-09-09T01:46:40+00:00")
    run.write_environment({"host": "elsewhere"})
    assert ending(run).state == "silent"
    run.checkpoints.mkdir()
    (run.checkpoints / LEASE).touch()
    assert ending(run).state == "failed"
    run.write_status(3, "running")
    assert ending(run).state == "running"


@pytest.mark.parametrize(
    "status",
    [
        {"state": "failed"},
        {"state": "failed", "reason": "text"},
        {"state": "failed", "reason": {"problem": 5, "have": [1], "step": "x"}, "ended": 3},
        {"state": 7, "steps": "many", "reason": None},
        {"state": "running"},
        {},
    ],
)
@pytest.mark.parametrize("log", ["", "{}\n", "\xff" * 9999, "2026 critical rank 0 step 3 update burnish: the run ends with an error\n    ValueError: x\n"])  # fmt: skip
def test_any_status_and_log_give_a_state(tmp_path: Path, status: dict[str, Any], log: str) -> None:
    run = RunDirectory(tmp_path)
    for place in (run.logs, run.checkpoints):
        place.mkdir()
    (run.checkpoints / LEASE).touch()
    (run.logs / "rank-0.log").write_text(log)
    run.status.write_text(json.dumps(status))
    state, reason, ended = ending(run)
    assert (state == "failed") == (status.get("state") in ("failed", "running"))
    assert (reason is not None) == (state == "failed")
    assert ended is None or isinstance(ended, str)
    if reason is not None and "critical" in log and not isinstance(status.get("reason"), dict):
        assert (reason["problem"], reason["step"]) == ("ValueError: x", 3)
