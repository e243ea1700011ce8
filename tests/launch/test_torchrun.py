"""torchrun with a number of machines that changes: the run goes on with what is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from processes_for_tests import until

pytestmark = pytest.mark.nightly
ARGV = [
    *("sft", "sft.yaml", "name=torchrun", "steps=100000", "evaluation.every=0"),
    *("checkpoint.save_every=1", "engine.tensor_parallel=2"),
    *("distributed.min_processes=1", "distributed.timeout_seconds=100"),
]


class Machine:
    """An agent of torchrun with one rank. They meet at the first one."""

    def __init__(self, work: Path, number: int, port: int) -> None:
        self.log, self.port = work / f"machine-{number}.txt", port
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *("--rdzv-id=run", "--local-addr=127.0.0.1"),
            f"--rdzv-conf=last_call_timeout=5,is_host={number == 0}",
        ]
        root = str(Path(__file__).parents[2])
        environ = {"PYTHONPATH": root, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*agent, "-m", "burnish", *ARGV],
                cwd=work,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
            )


@pytest.fixture
def machines(work: Path) -> Iterator[list[Machine]]:
    port = free_port()
    found = [Machine(work, number, port) for number in range(2)]
    yield found
    for each in found:
        each.process.kill()
        each.process.wait()


def test_machines_leave_and_come_back(work: Path, machines: list[Machine]) -> None:

    def said() -> str:
        return "".join(each.log.read_text() for each in machines)

    def worlds() -> list[str]:
        return [line.split()[-2] for line in said().splitlines() if " precision fp32, " in line]

    until(lambda: said().count("\nstep ") > 2)
    assert worlds() == ["2"]
    machines[1].process.send_signal(signal.SIGKILL)
    until(lambda: "does not fit 1 processes" in said())

    until(lambda: "INFO steps" in said().rpartition("not fit")[2])
    machines.append(Machine(work, 2, machines[0].port))
    until(lambda: worlds().count("2") == 2)
    until(lambda: said().rpartition("2 processes\n")[2].count("\nstep ") > 2)
    for each in machines:
        each.process.terminate()
        each.process.wait()
