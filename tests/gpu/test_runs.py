"""`burnish sft` and `burnish rl` on one device, and what they come to when they are killed on the way.

Every command is a process of its own: a GPU must not be touched before a fork.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICES
from training_files import make_files, metrics, weights

from burnish.distributed.device import device_name
from burnish.tracking.trackers import read_metrics

REPOSITORY = Path(__file__).parents[2]
STEPS = 6
KINDS = {"sft": ("train/loss", "val/loss"), "rl": ("reward/mean", "val/mean@1")}
COMMON = ["engine.precision=bf16", f"steps={STEPS}", "checkpoint.save_every=1"]
KILLED = "burnish.engines.torch.torch_engine:TorchEngine.optim_step", 3, signal.SIGKILL
"""Where a run kills itself: in its third step."""
SECONDS = 600


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("device"))


PROGRAM = """\
import sys
from commands_for_tests import signal_at
from burnish.cli.main import main
signal_at(*{at})
sys.exit(main(sys.argv[1:]))
"""


def start(
    work: Path,
    kind: str,
    name: str,
    device: torch.device,
    at: tuple[str, int, int] | None = None,
) -> subprocess.Popen[bytes]:
    """A run; `at` is as in `training_files.At`."""
    program = ["-m", "burnish"] if at is None else ["-c", PROGRAM.format(at=(*at[:2], int(at[2])))]
    modules = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    hidden = {} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    with (work / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *program, kind, f"{kind}.yaml", f"name={name}", *COMMON],
            cwd=work,
            env=os.environ | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"} | hidden,
            stdout=log,
            stderr=log,
        )


def finish(process: subprocess.Popen[bytes], work: Path, name: str, code: int = 0) -> None:
    try:
        assert process.wait(SECONDS) == code, (work / f"{name}.txt").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_the_same_killed_and_resumed(work: Path, kind: str, device: torch.device) -> None:
    peaceful, killed = f"{kind}_{device.type}", f"{kind}_{device.type}_killed"
    finish(start(work, kind, peaceful, device), work, peaceful)
    run = work / "runs" / peaceful
    rows, names = read_metrics(run / "metrics.jsonl"), KINDS[kind]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for name in (*names, "perf/tokens_per_s", "perf/mfu"):
        assert all(math.isfinite(row[name]) for row in rows if name in row)
        assert any(name in row for row in rows), name
    surroundings = json.loads((run / "environment.json").read_text())
    assert surroundings["device"] == device_name(device)

    finish(start(work, kind, killed, device, KILLED), work, killed, -signal.SIGKILL)
    finish(start(work, kind, killed, device), work, killed)
    resumed = work / "runs" / killed
    assert "resuming step" in (work / f"{killed}.txt").read_text()
    assert [row["step"] for row in metrics(resumed)] == list(range(STEPS + 1))
    if device.type == "cpu":
        assert metrics(resumed) == metrics(run)
    elif kind == "sft":  # a GPU adds gradients up in any order; sampled tokens may then differ
        for mine, theirs in zip(metrics(resumed), metrics(run), strict=True):
            assert mine == pytest.approx(theirs, rel=2e-2, abs=1e-3)
    mine, theirs = weights(resumed), weights(run)
    assert mine.keys() == theirs.keys()
    if device.type == "cpu":
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
