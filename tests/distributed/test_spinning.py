"""Threads of torch that wait while other programs take the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.distributed import spinning
from burnish.distributed.environment import environ_of_child

CROWDED = """
import json, os, subprocess, sys, threading, time
import torch
from burnish.distributed.spinning import brief_while_crowded

def products():
    return [torch.mm(factor, factor).sum().item() for factor in factors]

def threads():
    return len(os.listdir("/proc/self/task"))

torch.manual_seed(0)
factors = [torch.randn(256, 256) for _ in range(8)]
alone, before = products(), threads()
cores = len(os.sched_getaffinity(0))
loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
try:
    with brief_while_crowded():
        watched, end = threads(), time.monotonic() + 60
        while threads() <= watched and time.monotonic() < end:
            equal = products() == alone
        most = threads()
        equal = equal and products() == alone
finally:
    for loop in loops:
        loop.kill()
        loop.wait()
end = time.monotonic() + 60
while threads() > before and time.monotonic() < end:
    time.sleep(0.01)
print(json.dumps([before, watched, most, threads(), equal]))
"""


def threads_when_crowded(**environ: str) -> list[int]:
    """Threads before, watched, beside endless loops and afterwards, of a process with two threads; whether numbers stay."""
    free = {n: v for n, v in os.environ.items() if n not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    given = {"PYTHONPATH": environ_of_child()["PYTHONPATH"], "OMP_NUM_THREADS": "2"} | environ
    command = [sys.executable, "-c", CROWDED.replace("+ 60", "+ 2") if environ else CROWDED]
    done = subprocess.run(command, env=free | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").is_file() or len(os.sched_getaffinity(0)) < 2,
    reason="the kernel does not tell who waits, or one core has no threads to wait",
)
def test_teams_sleep_beside_the_work_while_others_take_the_cores() -> None:
    before, watched, most, after, is_equal = threads_when_crowded()
    assert watched == before + 1
    assert most > watched
    assert after == before
    assert is_equal


@pytest.mark.nightly
@pytest.mark.parametrize("setting", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}])
def test_a_waiting_that_the_user_has_set_stays(setting: dict[str, str]) -> None:
    before, watched, most, _, is_equal = threads_when_crowded(**setting)
    assert before == watched == most
    assert is_equal


def test_one_thread_is_not_watched() -> None:
    assert spinning._teams(1, 64) == 0


@given(st.integers(2, 256), st.integers(1, 256))
def test_teams_outnumber_the_cores(threads: int, cores: int) -> None:
    teams = spinning._teams(threads, cores)
    assert threads + teams * (threads - 1) > cores or threads + 16 * (threads - 1) <= cores
