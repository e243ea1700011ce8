"""Threads of torch that wait while other programs take the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

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
@pytest.mark.nightly
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


@pytest.mark.parametrize(("waits", "is_used"), [(True, True), (True, False), (False, True)])
def test_teams_sleep_only_if_threads_wait_and_others_work(
    monkeypatch: pytest.MonkeyPatch, waits: bool, is_used: bool
) -> None:
    """A run's own threads wait for those that spin, so that waiting alone is no sign of other programs."""
    ticks = iter(range(1, 1000))
    looked: list[int] = []

    def waited() -> dict[str, float]:
        looked.append(next(ticks))
        return {"1": looked[-1] * 10.0 * waits}

    started: list[Event] = []
    end = Event()
    monkeypatch.setattr(spinning, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(spinning, "_waited", waited)
    monkeypatch.setattr(spinning, "_used_by_others", lambda: looked[-1] * 10.0 * is_used)
    monkeypatch.setattr(spinning, "_sleep_as_team", started.append)
    watcher = Thread(target=spinning._watch, args=(end, 2))
    watcher.start()
    while len(looked) < 20:
        end.wait(0.001)
    end.set()
    watcher.join()
    assert len(started) == (2 if waits and is_used else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat")
def test_a_childs_work_counts_as_another_programs() -> None:
    before = spinning._used_by_others()
    own = time.process_time()
    loop = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-S", "-c", loop], check=True)
    while time.process_time() < own + 0.5:
        pass
    assert spinning._used_by_others() - before >= 0.4


def test_one_thread_is_not_watched() -> None:
    assert spinning._teams(1, 64) == 0


@given(st.integers(2, 256), st.integers(1, 256))
def test_teams_outnumber_the_cores(threads: int, cores: int) -> None:
    teams = spinning._teams(threads, cores)
    assert threads + teams * (threads - 1) > cores or threads + 16 * (threads - 1) <= cores
