from __future__ import annotations

import os
import resource
import socket
import time
import types
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks.ports import free_port
from support.ranks.processes import RankFailed, run_processes, run_ranks, torchrun_environ
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from burnish.distributed import meeting
from burnish.distributed.device import (
    free_memory,
    has_fp64,
    peak_memory,
    pick_device,
    reset_peak_memory,
    total_memory,
    used_memory,
)
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import raise_descriptors
from burnish.distributed.processes import Mesh, backend_of, process_group
from burnish.distributed.rank_place import RankPlace
from burnish.errors import BurnishError, UsageError

CPU = torch.device("cpu")


def test_rank_0_says_for_whom_it_waits(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "_SILENT_SECONDS", 0.1)
    store = HashStore()
    store.set("met/1", "here")
    store.add("met/count", 1)
    with caplog.at_level("INFO"), pytest.raises(BurnishError) as caught:
        meeting.await_everybody(store, Layout(0, 3, 0, 3), timedelta(seconds=1), "met")
    assert "2 of 3" in caplog.text
    assert "rank 2" in str(caught.value)
    monkeypatch.setattr(meeting, "_SILENT_SECONDS", 1e6)
    with pytest.raises(BurnishError):
        meeting.await_everybody(store, Layout(0, 3, 0, 3), timedelta(seconds=0.2), "again")
    meeting.await_everybody(store, Layout(2, 3, 2, 3), timedelta(seconds=1), "met")


def test_a_lone_process_has_a_group_and_a_mesh():
    with process_group(CPU, 5, RankPlace(Layout())) as layout:
        assert layout == Layout(0, 1, 0, 1)
        assert init_device_mesh("cpu", (1,)).size() == 1
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_a_backend_without_a_settable_timeout_has_a_mesh():
    # Like XCCL's and HCCL's groups, it has options, and nothing that sets its time-out.
    options = FakeProcessGroup.Options()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4, pg_options=options)
    try:
        assert dist.group.WORLD._get_backend(CPU).options is not None
        assert Mesh.of(Layout(0, 4, 0, 4), 2, CPU).weights.shape == (2, 2)
    finally:
        dist.destroy_process_group()


def test_the_group_is_destroyed_after_an_error_that_passes_unchanged():
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised, process_group(CPU, 5, RankPlace(Layout())):
        raise error
    assert raised.value is error
    assert not dist.is_initialized()


def test_backends_reduce_tensors_of_the_device_and_of_the_cpu():
    assert backend_of(CPU) == "gloo"
    assert backend_of(torch.device("cuda", 3)) == "cpu:gloo,cuda:nccl"
    assert backend_of(torch.device("xpu")) == "cpu:gloo,xpu:xccl"
    with pytest.raises(UsageError):
        backend_of(torch.device("mps"))


def _as_beside_torch_npu():
    """Only a process in which torch knows the name npu, as beside torch_npu, can have such a device."""
    torch.utils.rename_privateuse1_backend("npu")
    torch.accelerator.current_accelerator = lambda check_available: torch.device("npu")
    torch.accelerator.device_count = lambda: 2
    own = types.ModuleType("npu")
    own.memory_allocated, own.max_memory_allocated = (lambda device: 3), (lambda device: 5)
    own.memory_reserved, own.mem_get_info = (lambda device: 4), (lambda device: (10, 16))
    own.reset_peak_memory_stats = lambda device: None
    torch._register_device_module("npu", own)
    devices = [pick_device(rank) for rank in range(2)]
    reset_peak_memory(devices[1])
    memory = [each(devices[1]) for each in (used_memory, peak_memory, free_memory, total_memory)]
    return [str(each) for each in devices], backend_of(devices[1]), has_fp64(devices[1]), memory


def test_an_npu_has_a_backend_and_no_fp64():
    (answer,) = run_processes(_as_beside_torch_npu, [{}])
    assert answer == (["npu:0", "npu:1"], "cpu:gloo,npu:hccl", False, [3, 5, 11, 16])


def _sum(layout):
    total = torch.tensor([layout.rank + 1])
    dist.all_reduce(total)
    return layout, int(total)


def test_ranks_form_one_group():
    assert run_ranks(_sum, 3) == [(Layout(rank, 3, rank, 3), 6) for rank in range(3)]


def _joined(directory):
    """Which ranks have joined when this one begins; joining takes the last one longest."""
    join = dist.init_process_group

    def slowly(*args, rank, **kwargs):
        join(*args, rank=rank, **kwargs)
        time.sleep(rank / 2)
        (directory / str(rank)).touch()

    dist.init_process_group = slowly
    with process_group(CPU, 60):
        return sorted(path.name for path in directory.iterdir())


def test_nobody_begins_before_all_have_joined(tmp_path):
    """A rank that has nothing to do, or an error to raise, would leave while others still connect to it."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), wait_for_workers=False)
    environs = [torchrun_environ(rank, 2, store.port) for rank in range(2)]
    assert run_processes(_joined, environs, tmp_path) == [["0", "1"]] * 2


def _sum_with_environment():
    with process_group(CPU, 20) as layout:
        return _sum(layout)[1]


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1"])
def test_rank_0_serves_the_store_where_no_agent_does(host):
    try:
        port = free_port(host.strip("[]"))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    environs = [torchrun_environ(rank, 2, port, host) for rank in range(2)]
    environs = [environ | {"TORCHELASTIC_USE_AGENT_STORE": "False"} for environ in environs]
    assert run_processes(_sum_with_environment, environs) == [3, 3]


def test_slurm_tasks_meet():
    environs = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_JOB_ID": str(os.getpid()),
        }
        for rank in range(2)
    ]
    assert run_processes(_sum_with_environment, environs) == [3, 3]


def test_a_rank_that_does_not_come_is_named():
    store = dist.TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=20), wait_for_workers=False)
    place = RankPlace(Layout(1, 3, 1, 3), "127.0.0.1", store.port, agent_store=True)
    with (
        pytest.raises(BurnishError, match=r" 3 ranks.*\n.* 0, 2"),
        process_group(CPU, 0.5, place),
    ):
        pass
    assert not dist.is_initialized()


def _with_few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 2000))
    raise_descriptors(0)
    limits = [resource.getrlimit(resource.RLIMIT_NOFILE)]
    raise_descriptors(1000)
    limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    with pytest.raises(UsageError):
        raise_descriptors(2000)
    return limits


def test_descriptors_are_raised_as_far_as_the_system_allows():
    assert run_processes(_with_few_descriptors, [{}]) == [[(600, 2000), (2000, 2000)]]


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = RankPlace(Layout(0, 2, 0, 2), "127.0.0.1", port)
        with (
            pytest.raises(BurnishError, match=f"127.0.0.1 port {port}"),
            process_group(CPU, 2, place),
        ):
            pass


def test_a_meeting_point_that_is_not_there_is_named():
    port = free_port()
    place = RankPlace(Layout(1, 2, 1, 2), "127.0.0.1", port)
    with (
        pytest.raises(BurnishError, match=f"127.0.0.1 port {port}"),
        process_group(CPU, 1, place),
    ):
        pass


def _skip_a_collective(seconds, port):
    """Rank 1 stays, so only the time-out can free rank 0, and leaves when that has happened."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        with process_group(CPU, seconds) as layout:
            if layout.rank == 1:
                store.wait(["freed"], timedelta(seconds=60))
                return ""
            try:
                dist.all_reduce(torch.ones(1))
            finally:
                store.set("freed", "")
    except BurnishError as error:
        return str(error)
    return "no error"


@pytest.mark.nightly
def test_the_timeout_bounds_a_collective_that_a_rank_skips():
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    environs = [torchrun_environ(rank, 2, store.port) for rank in range(2)]
    error, other = run_processes(_skip_a_collective, environs, 4.0, store.port, timeout=120)
    assert "rank 0 waited 4 s " in error
    assert other == ""


def _open_twice():
    return [_sum_with_environment() for _ in range(2)]


def test_a_group_can_be_opened_again_over_the_same_store():
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    environs = [torchrun_environ(rank, 2, store.port) for rank in range(2)]
    assert run_processes(_open_twice, environs) == [[3, 3]] * 2


def _fail(layout):
    if layout.rank == 1:
        raise ValueError("boom")
    return "fine"


def _fails_amid_collectives_of_nccl():
    dist.get_backend_config = lambda: backend_of(torch.device("cuda"))
    dist.destroy_process_group = pytest.fail  # which waits for collectives that others may not join
    with suppress(ValueError, BurnishError), process_group(CPU, 20) as layout:
        dist.new_group([layout.rank], use_local_synchronization=True)
        raise ValueError
    return dist.is_initialized()


def test_after_an_error_nobody_waits_for_collectives_of_nccl():
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    environs = [torchrun_environ(rank, 2, store.port) for rank in range(2)]
    assert run_processes(_fails_amid_collectives_of_nccl, environs) == [False, False]


def test_run_ranks_raises_with_the_traceback_of_the_failing_rank():
    with pytest.raises(RankFailed, match="ValueError: boom") as raised:
        run_ranks(_fail, 2)
    assert set(raised.value.failures) == {1}
    assert raised.value.results == {0: "fine"}
