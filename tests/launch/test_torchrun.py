"""torchrun with a number of machines that changes: the run goes on with what is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    """An agent of torchrun with one rank."""

    def __init__(self, work: Path, number: int, port: int) -> None:
        self.log = work / f"machine-{number}.txt"
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *("--rdzv-id=run", "--rdzv-conf=last_call_timeout=5", "--local-addr=127.0.0.1"),
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


def test_machines_leave_and_come_back(work: Path) -> None:
    port = free_port()
    machines = [Machine(work, number, port) for number in range(2)]

    def said() -> str:
        return "".join(each.log.read_text() for each in machines)

    def worlds() -> list[str]:
        return [line.split()[-2] for line in said().splitlines() if " precision fp32, " in line]

    until(lambda: said().count("\nstep ") > 2)
    assert worlds() == ["2"]
    machines[1].process.send_signal(signal.SIGKILL)
    until(lambda: "does not fit 1 processes" in said())

    until(lambda: "INFO steps" in said().rpartition("not fit")[2])
    machines.append(Machine(work, 2, port))
    until(lambda: worlds().count("2") == 2)
    until(lambda: said().rpartition("2 processes\n")[2].count("\nstep ") > 2)
    for each in machines:
        each.process.terminate()
    for each in machines:
        each.process.wait()
