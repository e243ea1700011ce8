"""Runs that save in the background, killed and stopped: they come to the same end as one that saves and is left in peace.

A few kills of some kinds; `make faults` makes fifty of each.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from support.checkpoints.states import committed
from support.faults.killed_runs import KINDS, SAVING, killed
from support.ranks.fork_server import ANEW
from support.runs.training_files import At, Command, burnish, done, make_files, outcome

RUNS = [("sft", 2), ("rl", 1), ("ahead", 2), ("pipeline", 2)]
"""Kinds that are killed at random, and on how many processes."""


@pytest.fixture(autouse=True)
def _companions_anew(monkeypatch):
    """Companions start as those of users do, so that the system names the process that started each."""
    monkeypatch.setenv(ANEW, "1")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("background"))


@pytest.fixture(scope="module")
def in_peace(work):
    """By kind and number of processes, what a run without background saves comes to."""
    return cache(
        lambda kind, world: outcome(
            done(work, *KINDS[kind], f"name=peace_{kind}_{world}", world=world)
        )
    )


def children(pid):
    """The processes that a process has started and that have not ended."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "world"), RUNS)
def test_killed_at_random_moments(work, in_peace, kind, world):
    run = killed(work, kind, world, 3 - world, f"random_{kind}_{world}")
    assert outcome(run) == in_peace(kind, world)


SAVER = "burnish.checkpoint.background"
CHOSEN = {
    "sft": [(f"{SAVER}:stage", 1), (f"{SAVER}:BackgroundSaver.begin", 2), (f"{SAVER}:Companion.kill", 1)],
    "rl": [("burnish.tracking.report:write_report", 1), (f"{SAVER}:BackgroundSaver.finished", 4)],
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_killed_at_chosen_moments(work, in_peace, kind):
    argv = [*KINDS[kind], f"name=chosen_{kind}", *SAVING]
    for place, nth in CHOSEN[kind]:
        code, output = burnish(work, *argv, at=At(place, nth, signal.SIGKILL))
        assert code == -signal.SIGKILL, output
    assert outcome(done(work, *argv)) == in_peace(kind, 1)


@pytest.mark.nightly
def test_stopped_by_a_signal(work, in_peace):
    number = signal.SIGTERM
    argv = [*KINDS["sft"], "name=stopped", *SAVING]
    run = work / "runs/stopped"
    before = 0
    for place, nth in [
        (f"{SAVER}:stage", 2),
        ("burnish.engines.torch.torch_engine:TorchEngine.forward_backward", 2),
        (f"{SAVER}:BackgroundSaver.finished", 2),
    ]:
        code, output = burnish(work, *argv, at=At(place, nth, number))
        assert code == 128 + number, output
        step = committed(run / "checkpoints")[-1].step
        assert f"stopped by {number.name}: step {step} is committed in runs/{run.name}" in output
        assert before <= step <= before + nth
        before = step
    assert outcome(done(work, *argv)) == in_peace("sft", 1)


def test_a_signal_to_all_processes_of_the_run(work):
    """As a terminal's Ctrl-C or Slurm's SIGTERM: the writer gets it too."""
    argv = [*KINDS["sft"], "name=group", "steps=5000", *SAVING]
    command = Command(work, argv)
    command.reached(0)
    writers = children(command.pid)
    assert writers
    for pid in (*writers, command.pid):
        os.kill(pid, signal.SIGTERM)
    assert command.wait(60) == 128 + signal.SIGTERM, command.output
    assert "is committed in runs/group" in command.output
    assert "NOT SAVED" not in command.output
    assert list((work / "runs/group/checkpoints").glob(".inflight*")) == []


@pytest.mark.nightly
def test_a_writer_that_is_killed_again_and_again_stops_nothing(work, in_peace):
    moments = random.Random(5)
    argv = [*KINDS["sft"], "name=writers", "steps=12", *SAVING]
    command = Command(work, argv)
    command.reached(0)
    killed = 0
    while command.is_running():
        for pid in children(command.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(moments.uniform(0.1, 2))
    assert command.wait() == 0, command.output
    assert killed
    assert "started again" in command.output or "NOT SAVED" in command.output
    peace = outcome(done(work, *KINDS["sft"], "name=long_peace", "steps=12"))
    assert outcome(work / "runs/writers") == peace


@pytest.mark.nightly
def test_a_full_disk_is_said_and_training_goes_on_to_where_it_has_to_be_saved(work):
    argv = [*KINDS["sft"], "name=full", *SAVING, "checkpoint.reserve_gb=1e9"]
    code, output = burnish(work, *argv)
    assert code == 1, output
    assert "STEP 1 IS NOT SAVED; training goes on" in output
    assert "checkpoint.reserve_gb" in output
    assert "\nstep  6/6" in output or "step 6/6" in output
    assert list((work / "runs/full/checkpoints").glob("step-*")) == []
    done(work, *argv[:-1])
