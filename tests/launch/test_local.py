"""`--processes` with processes of their own: who outlives whom, and what comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.checkpoints.states import committed
from support.ranks.waiting import until

pytestmark = pytest.mark.nightly
ARGV = ["sft", "sft.yaml", "checkpoint.save_every=1", "evaluation.every=0", "steps=4000"]


def started(work: Path, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    log = work / f"{name}.txt"
    argv = [sys.executable, "-m", "burnish", *ARGV, f"name={name}", "--processes", "2"]
    root = Path(__file__).parents[2]
    with log.open("w") as file:
        return subprocess.Popen(
            argv, cwd=work, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(root)}
        ), log


def ranks(driver: subprocess.Popen[bytes]) -> list[int]:
    """The processes that the command has started, in the order of their ranks."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (each / "stat").read_text().rpartition(")")[2].split()[1]
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (each / "environ").read_bytes())
            if rank and int(parent) == driver.pid:
                found[int(rank[1])] = int(each.name)
    return [found[rank] for rank in sorted(found)]


def test_ranks_are_started_again_stopped_and_end_with_the_command(work: Path) -> None:
    driver, log = started(work, "local")
    steps = work / "runs/local/checkpoints"
    until(lambda: steps.exists() and len(list(committed(steps))) > 1)
    before = ranks(driver)
    os.kill(before[1], signal.SIGKILL)
    until(lambda: len(ranks(driver)) == 2 and not {*ranks(driver)} & {*before})
    assert "starting the run again" in log.read_text()
    until(lambda: log.read_text().count("INFO steps") == 2)
    until(lambda: log.read_text().rpartition("INFO steps")[2].count("\nstep ") > 2)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(200) == 128 + signal.SIGTERM, log.read_text()
    last = int(re.findall(r"step (\d+) is committed", log.read_text())[-1])
    assert [each.step for each in committed(steps)][-1] == last

    driver, log = started(work, "local")
    until(lambda: log.read_text().count("\nstep ") > 2)
    left = ranks(driver)
    driver.kill()
    driver.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), seconds=10)
