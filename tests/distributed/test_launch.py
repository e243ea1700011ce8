from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from burnish.config.schema import DistributedConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.errors import UsageError

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")

SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from burnish.config.schema import DistributedConfig
from burnish.distributed.processes import launch

def work(layout, device):
    total = torch.tensor([layout.rank + 1])
    dist.all_reduce(total)
    if sys.argv[2] == "die" and layout.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "die":
        while True:
            dist.all_reduce(total)
    answer = [layout.rank, layout.world, layout.local_rank, layout.local_world, int(total), str(device), torch.get_num_threads()]
    with open(f"{sys.argv[1]}/{layout.rank}", "w") as out:
        json.dump(answer, out)

launch(work, DistributedConfig(timeout_seconds=600))
"""


@pytest.fixture
def alone(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_is_a_run_of_one_rank(alone):
    def work(layout, device):
        assert dist.is_initialized()
        return layout, device.type

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = "cpu" if accelerator is None else accelerator.type
    assert launch(work, DistributedConfig()) == (Layout(), expected)
    assert not dist.is_initialized()


def test_a_half_set_environment_stops_before_the_work(alone):
    alone.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        launch(lambda layout, device: pytest.fail("started"), DistributedConfig())


def _torchrun(tmp_path, what, **extra):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, str(script), str(tmp_path), what],
        env=environ | {"CUDA_VISIBLE_DEVICES": ""} | extra,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.nightly
def test_torchrun(tmp_path):
    done = _torchrun(tmp_path, "live", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert answers == [[rank, 2, rank, 2, 3, "cpu", 1] for rank in range(2)]


@pytest.mark.nightly
def test_a_rank_that_dies_under_torchrun(tmp_path):
    """The other does not wait out its collective, which would outlast the whole test."""
    done = _torchrun(tmp_path, "die", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr
    named = f"rank 1 (host {socket.gethostname()}, pid "
    assert named in done.stderr or "SIGTERM" in done.stderr  # whoever was quicker, we or the agent
