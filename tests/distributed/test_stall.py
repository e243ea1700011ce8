"""Runs in which nothing moves: the report names the rank, its phase and its function, and all ranks end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks.processes import RankFailed, run_processes, torchrun_environ

from burnish.distributed import stall
from burnish.distributed.environment import place_of
from burnish.distributed.processes import process_group
from burnish.distributed.stall import likely_cause
from burnish.tracking import logs
from burnish.tracking.spans import Spans

STALL = 1.5


def sleeps_in_a_named_function() -> None:
    time.sleep(300)


def blocks_on_a_pipe() -> None:
    Path("pipe").open("w").close()  # nobody reads it


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(300)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps_past_the_timeout() -> None:
    time.sleep(6)


def _part(root: str, act: str, who: int, timeout: float, stall: float) -> None:
    """What one rank does: a few steps, then rank `who` acts and the others wait for it."""
    os.chdir(root)
    rank, spans = int(os.environ.get("RANK", 0)), Spans()
    os.dup2(os.open(f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    place = place_of(os.environ)
    with (
        process_group(torch.device("cpu"), timeout, place, stall) as layout,
        logs.rank_log(Path(f"logs/rank-{rank}.log"), rank, spans, "text"),
    ):
        for spans.step in range(1, 4):
            with spans("update"):
                dist.all_reduce(torch.ones(1))
        with spans("rollout"):
            if layout.rank == who:
                globals()[act]()
            dist.all_reduce(torch.ones(1))


def _reports(
    root: Path, act: str, who: int, world: int = 3, timeout: float = 60, stall: float = STALL
) -> str:
    """The report on the ranks, which all have to fail."""
    os.mkfifo(root / "pipe")
    store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
    environs = [torchrun_environ(rank, world, store.port) for rank in range(world)]
    environs = environs if world > 1 else [{}]
    with pytest.raises(RankFailed) as raised:
        run_processes(_part, environs, str(root), act, who, timeout, stall, timeout=60)
    assert set(raised.value.failures) == set(range(world))
    assert "did not end in time" not in raised.value.failures.values()
    printed = [(root / f"stderr-{rank}").read_text() for rank in range(world)]
    assert "".join(printed).count("burnish: nothing has moved") <= 1
    return "\n".join([*printed, *raised.value.failures.values()])


@pytest.mark.parametrize(
    "act",
    [pytest.param(sleeps_in_a_named_function, marks=pytest.mark.nightly), blocks_on_a_pipe],
)
def test_the_rank_that_does_not_come_is_named_with_its_function(tmp_path, act):
    said = _reports(tmp_path, act.__name__, 2)
    first = said.strip().splitlines()[0]
    assert first.startswith("burnish: nothing has moved on any rank for ")
    assert (
        f"rank 2 has been in tests.distributed.test_stall.{act.__name__} (test_stall.py line"
        in first
    )
    assert (
        "ranks 0-1 have been waiting in all_reduce called by tests.distributed.test_stall._part"
        in first
    )
    assert "step 3, rollout for" in said
    assert f"in {act.__name__}" in said
    assert first in (tmp_path / "logs/rank-0.log").read_text()


@pytest.mark.parametrize(
    ("act", "who", "state"),
    [
        pytest.param("is_stopped", 1, "T (stopped)", marks=pytest.mark.nightly),
        pytest.param("is_stopped", 0, "T (stopped)", marks=pytest.mark.nightly),
        pytest.param("holds_the_interpreter", 1, "S (sleeping)", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_cannot_answer_is_named(tmp_path, act, who, state):
    said = _reports(tmp_path, act, who, 2)
    assert re.search(
        rf"rank {who} (is not answering|does not answer): [a-z ]+ {re.escape(state)}", said
    )
    assert "all_reduce" in said


@pytest.mark.nightly
def test_a_report_comes_before_a_collective_times_out(tmp_path):
    said = _reports(tmp_path, "sleeps_past_the_timeout", 1, 2, timeout=3, stall=0)
    assert re.search(r"any rank for \d+ s, and collectives fail after 3 s: rank 1 ", said)
    assert "waited 3 s in a collective" in said


def test_a_lone_process_is_watched_too(tmp_path):
    said = _reports(tmp_path, "sleeps_in_a_named_function", 0, 1)
    assert "nothing has moved for " in said
    assert "rank 0 has been in tests.distributed.test_stall.sleeps_in_a_named_function" in said


def test_the_memory_told_is_that_of_the_ranks_own_device(monkeypatch):
    """Every thread of CUDA begins on device 0, where asking would take memory for this rank."""

    def chosen() -> torch.device:
        is_main = threading.current_thread() is threading.main_thread()
        return torch.device("cuda", 3 if is_main else 0)

    monkeypatch.setattr(stall, "current_device", chosen)
    monkeypatch.setattr(stall, "used_memory", lambda device: 1e9 * device.index)
    monkeypatch.setattr(stall, "total_memory", lambda device: 8e9)
    watchdog = stall.Watchdog(stall.NO_LIMITS, lambda still: None)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(watchdog.memory).result()["memory"] == "cuda: 3.00 of 8.00 GB"


def test_those_that_wait_for_nobody_are_the_cause():
    def at(place: str, collective: str = "") -> dict[str, object]:
        return {"still": 640, "place": place, "collective": collective, "waits": ""}

    waiting = {rank: at("f", "all_gather of layers.12") for rank in (0, 1, 2, 5)}
    assert likely_cause(waiting | {3: at("check")}, {}) == (
        3,
        "rank 3 has been in check for 640 s; ranks 0-2, 5 have been waiting in all_gather of layers.12 called by f for 640 s",
    )
    assert likely_cause(waiting | {3: at("check")}, {4: "T (stopped)"})[0] == 4
    assert likely_cause(waiting | {3: at("g", "broadcast")}, {})[0] == 3
    assert likely_cause({0: at("f"), 1: at("f"), 2: at("g")}, {})[0] == 2
