from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from burnish.distributed.environment import place_of
from burnish.distributed.layout import Layout
from burnish.distributed.rank_place import RankPlace
from burnish.errors import UsageError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[03-05,9]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
}


def test_nobody_started_it():
    assert place_of({"HOME": "/root"}) == RankPlace(Layout(0, 1, 0, 1))


def test_torchrun():
    assert place_of(TORCHRUN) == RankPlace(
        Layout(3, 4, 1, 2), "head", 29500, agent_store=True, attempt=2
    )


def test_torchrun_wins_over_slurm():
    assert place_of(SLURM | TORCHRUN) == place_of(TORCHRUN)


def test_started_by_hand_without_sizes_of_the_machine():
    environ = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    place = place_of(environ | {"MASTER_ADDR": "[fd00::2]", "MASTER_PORT": "1"})
    assert place == RankPlace(Layout(3, 4, 1, 1), "fd00::2", 1)


def test_a_world_of_one_needs_no_address():
    assert place_of({"RANK": "0", "WORLD_SIZE": "1"}) == RankPlace(Layout(0, 1, 0, 1))


def test_slurm():
    place = place_of(SLURM)
    assert place.layout == Layout(5, 7, 1, 2)
    assert place.host == "node03"
    assert 15000 <= place.port < 30000
    assert not place.agent_store
    assert not place.own_device


def test_slurm_port_is_the_same_for_all_tasks_and_differs_between_jobs_and_steps():
    port = place_of(SLURM).port
    assert place_of(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port == port
    assert place_of(SLURM | {"SLURM_JOB_ID": "4243"}).port != port
    assert place_of(SLURM | {"SLURM_STEP_ID": "2"}).port != port


def test_slurm_address_can_be_given():
    place = place_of(SLURM | {"MASTER_ADDR": "fd00::2", "MASTER_PORT": "1234"})
    assert (place.host, place.port) == ("fd00::2", 1234)


def test_slurm_step_counts_before_the_job():
    assert place_of(SLURM | {"SLURM_STEP_NUM_TASKS": "6"}).layout.world == 6


def test_slurm_device_of_its_own():
    assert place_of(SLURM | {"SLURM_GPUS_PER_TASK": "1"}).own_device


def test_a_batch_script_without_srun_is_one_process():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    assert place_of(batch) == RankPlace(Layout())


@pytest.mark.parametrize(
    "missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
)
def test_half_set_torchrun(missing):
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UsageError, match=missing):
        place_of(environ)


@pytest.mark.parametrize("missing", ["SLURM_NTASKS", "SLURM_LOCALID"])
def test_half_set_slurm(missing):
    environ = {name: value for name, value in SLURM.items() if name != missing}
    with pytest.raises(UsageError, match=missing):
        place_of(environ)


@pytest.mark.parametrize("port", ["0", "-5", "70000"])
@pytest.mark.parametrize("environ", [TORCHRUN, SLURM])
def test_no_port(environ, port):
    with pytest.raises(UsageError, match=f"MASTER_PORT={port}"):
        place_of(environ | {"MASTER_PORT": port})


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "0")],
)
def test_contradictions(name, value):
    with pytest.raises(UsageError, match=rf"={value}\b|\b{value} processes"):
        place_of(TORCHRUN | {name: value})


def test_not_a_number():
    with pytest.raises(UsageError, match=r"MASTER_PORT.*\n.*'http'"):
        place_of(TORCHRUN | {"MASTER_PORT": "http"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[03-05,9]", "node03"),
        ("node7", "node7"),
        ("a1,b[2-3]", "a1"),
        ("gpu[9,11-12],cpu1", "gpu9"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("n[1-2]-ib,x", "n1-ib"),
        ("a-b-[004]", "a-b-004"),
    ],
)
def test_first_host(nodelist, host):
    assert place_of(SLURM | {"SLURM_STEP_NODELIST": nodelist}).host == host


def test_first_host_of_nothing():
    with pytest.raises(UsageError):
        place_of(SLURM | {"SLURM_STEP_NODELIST": ""})


def test_tasks_per_node():
    def on(node: int, counts: str) -> int:
        told = {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": counts}
        return place_of(SLURM | told).layout.local_world

    assert [on(node, "2(x3),1") for node in range(4)] == [2, 2, 2, 1]
    assert on(0, "4") == 4
    with pytest.raises(UsageError, match=r"SLURM_STEP_TASKS_PER_NODE.*\n.*2\*3"):
        on(0, "2*3")


CHILD = """
import os, sys, time
from burnish.distributed.environment import die_with_agent
die_with_agent(os.environ)
print(os.getpid(), flush=True)
time.sleep(1000)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that ends the ranks")
@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_rank_does_not_outlive_torchrun(under_torchrun: bool) -> None:
    """Any other process does outlive its parent: nohup and setsid count on it."""
    extra = {"TORCHELASTIC_RUN_ID": "none"} if under_torchrun else {}
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | extra) as parent:
        rank = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        if not under_torchrun:
            os.kill(rank, signal.SIGKILL)  # raises if there is none
        assert parent.stdout.read() == b""  # it ends only when the rank does
