"""torchrun on two machines: the run goes on with what is there, whatever dies in whatever phase."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.faults.paused_ranks import PausedRank, parent, paused_path, running_ranks
from support.ranks.ports import free_port
from support.ranks.waiting import until
from support.runs.training_files import done, outcome

pytestmark = pytest.mark.nightly
ARGV = [
    *("sft", "sft.yaml", "name=torchrun", "steps=100000", "evaluation.every=0"),
    *("checkpoint.save_every=1", "engine.tensor_parallel=2"),
    *("distributed.min_processes=1", "distributed.timeout_seconds=100"),
]
RL = [
    *("rl", "rl.yaml", "steps=8", "checkpoint.save_every=1"),
    *("evaluation.every=0", "evaluation.before=false"),
]
PATIENCE_SECONDS = 400


class Machine:
    """An agent of torchrun and its ranks. They meet at the first one."""

    _numbers = itertools.count()

    def __init__(
        self,
        work: Path,
        port: int,
        argv: Sequence[str],
        *options: str,
        hosts: bool = False,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log, self.port = work / f"machine-{next(self._numbers)}.txt", port
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts=10"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            # Ranks are in the order of addresses.
            *("--rdzv-id=run", f"--local-addr=127.0.0.{1 if hosts else 2}"),
            f"--rdzv-conf=last_call_timeout=5,is_host={hosts}",
        ]
        ours = {"PYTHONPATH": paused_path(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*agent, "-m", "burnish", *argv],
                cwd=work,
                stdout=log,
                stderr=log,
                env={**os.environ, **ours, **environ},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    found: list[Machine] = []
    yield found
    for each in found:
        each.kill()


def test_machines_leave_and_come_back(work: Path, machines: list[Machine]) -> None:
    port, options = free_port(), ("--nnodes=1:2", "--nproc-per-node=1")
    machines.append(Machine(work, port, ARGV, *options, hosts=True))
    machines.append(Machine(work, port, ARGV, *options))

    def said() -> str:
        return "".join(each.log.read_text() for each in machines)

    def worlds() -> list[str]:
        return [line.split()[-2] for line in said().splitlines() if " precision fp32, " in line]

    until(lambda: said().count("\nstep ") > 2)
    assert worlds() == ["2"]
    machines[1].process.send_signal(signal.SIGKILL)
    until(lambda: "does not fit 1 processes" in said())

    until(lambda: "INFO steps" in said().rpartition("not fit")[2])
    machines.append(Machine(work, port, ARGV, *options))
    until(lambda: worlds().count("2") == 2)
    until(lambda: said().rpartition("2 processes\n")[2].count("\nstep ") > 2)
    for each in machines:
        each.process.terminate()
        each.process.wait()


@pytest.fixture(scope="module")
def calm(work: Path) -> dict[str, Any]:
    return outcome(done(work, *RL, "name=calm", world=4))


@pytest.mark.parametrize("victim", ["main", "rank", "agent", "node", "driver"])
def test_a_run_that_dies_in_each_phase_goes_on_by_itself(
    work: Path, machines: list[Machine], calm: dict[str, Any], victim: str
) -> None:
    paused = PausedRank(work, victim, 0 if victim == "main" else 3)

    def start(*, hosts: bool) -> Machine:
        argv, options = [*RL, f"name={victim}"], ("--nnodes=2", "--nproc-per-node=2")
        return Machine(work, port, argv, *options, hosts=hosts, environ=paused.environ)

    def require_running() -> None:
        for each in machines[-2:]:
            assert each.process.poll() is None, said()

    def said() -> str:
        return "".join(each.log.read_text() for each in machines)

    port = free_port()
    machines += [start(hosts=True), start(hosts=False)]
    for _ in paused.phases(require_running):
        running = running_ranks(victim)
        pid, agent = running[paused.rank], parent(running[paused.rank])
        dying = next(each for each in machines if each.process.pid == agent)
        if victim in ("main", "rank"):
            os.kill(pid, signal.SIGKILL)
        elif victim == "driver":
            for each in machines[-2:]:
                each.kill()
            until(lambda: not running_ranks(victim), seconds=20)
            port = free_port()
            machines += [start(hosts=True), start(hosts=False)]
        else:
            for each in running.values():
                if victim == "node" and parent(each) == agent:
                    os.kill(each, signal.SIGKILL)
            dying.kill()
            machines.append(start(hosts=False))
            machines[-3:] = [each for each in machines[-3:] if each is not dying]
    for each in machines[-2:]:
        assert each.process.wait(PATIENCE_SECONDS) == 0, said()
    assert outcome(work / "runs" / victim) == calm, said()
