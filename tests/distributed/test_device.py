from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from burnish.distributed.accelerators import accelerator_named
from burnish.distributed.device import (
    device_name,
    free_memory,
    has_bf16_products,
    has_fp64,
    is_sm80_or_newer,
    measured_matmul_peak,
    peak_flops,
    peak_memory,
    pick_device,
    reset_peak_memory,
    share_cores,
    synchronize,
    total_memory,
    used_memory,
    widest_float,
)
from burnish.errors import UsageError

CPU = torch.device("cpu")
MB = 1 << 20


def _accelerator(monkeypatch, kind, count):
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_every_local_rank_has_its_accelerator(monkeypatch, kind):
    _accelerator(monkeypatch, kind, 2)
    assert [pick_device(rank) for rank in range(2)] == [torch.device(kind, i) for i in range(2)]


@pytest.mark.parametrize("kind", [None, "mps"])
def test_without_an_accelerator_that_can_talk_it_is_the_cpu(monkeypatch, kind):
    _accelerator(monkeypatch, kind, 1)
    assert pick_device(3) == CPU


def test_a_device_of_its_own_is_number_0(monkeypatch):
    _accelerator(monkeypatch, "cuda", 1)
    assert pick_device(3, own_device=True) == torch.device("cuda", 0)


def test_more_processes_than_devices(monkeypatch):
    _accelerator(monkeypatch, "cuda", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UsageError, match=r"local rank 2\n.*2 .*CUDA_VISIBLE_DEVICES=4,5"):
        pick_device(2)


def test_products_in_bf16_are_those_of_the_processors_instructions():
    """Those that oneDNN has kernels for, as the system lists them."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert has_bf16_products(CPU) == bool(flags & {"avx512bw", "avx_ne_convert", "bf16"})
    assert has_bf16_products(torch.device("cuda"))


@pytest.mark.parametrize(
    ("kind", "has"), [("cpu", True), ("cuda", True), ("xpu", True), ("mps", False)]
)
def test_which_devices_have_fp64(kind, has):
    assert has_fp64(torch.device(kind)) is has
    assert widest_float(torch.device(kind)) == (torch.float64 if has else torch.float32)


@pytest.mark.parametrize(
    ("version", "capability", "is_newer"),
    [
        ("13.0", (7, 5), False),
        ("13.0", (8, 0), True),
        ("13.0", (12, 0), True),
        (None, (9, 4), False),
    ],
    ids=["T4", "A100", "5090", "AMD"],
)
def test_which_devices_run_kernels_for_ampere(monkeypatch, version, capability, is_newer):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert is_sm80_or_newer(torch.device("cuda", 0)) is is_newer
    assert not is_sm80_or_newer(CPU)


def test_the_cpu_needs_no_waiting():
    synchronize(CPU)
    assert device_name(CPU)


def test_memory_of_the_process():
    reset_peak_memory(CPU)
    before = peak_memory(CPU)
    with mmap.mmap(-1, 64 * MB) as held:  # not from the allocator, which may have kept freed pages
        held.write(b"1" * 64 * MB)
        during = used_memory(CPU)
    assert during >= 64 * MB
    assert peak_memory(CPU) >= before + 32 * MB
    assert peak_memory(CPU) >= used_memory(CPU)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_the_peak_can_be_reset():
    with mmap.mmap(-1, 256 * MB) as held:  # memory that no allocator keeps
        held.write(b"x" * 256 * MB)
    high = peak_memory(CPU)
    reset_peak_memory(CPU)
    assert peak_memory(CPU) <= high - 128 * MB


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("Ascend910B3", 313),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA L40", None),
        ("Intel(R) Xeon(R) Processor", None),
    ],
)
def test_known_peaks(name, tflops):
    known = accelerator_named(name)
    assert (known and known.flops) == (tflops and tflops * 1e12)


@pytest.mark.parametrize("speed", [1e9, 1e11, 1e13])
def test_a_peak_is_measured_where_it_is_not_known(monkeypatch, speed):
    """By a clock that only products move, at this speed; overhead makes the small ones look slower."""
    now = [100.0]

    def product(left, right, out):
        now[0] += 2 * len(left) ** 3 / speed + 1e-6

    monkeypatch.setattr("burnish.distributed.device.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", product)
    assert measured_matmul_peak(CPU, torch.float32) == pytest.approx(speed, rel=1e-2)
    least = 4 * 2 * 512**3 / speed  # what any measurement takes
    assert now[0] - 100 < max(0.5, least) + 1e-3


def test_a_known_peak_is_not_measured(monkeypatch):
    monkeypatch.setattr("burnish.distributed.device.device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("burnish.distributed.device.measured_matmul_peak", lambda *_: 7.0)
    assert peak_flops(CPU, torch.bfloat16) == 989e12
    assert peak_flops(CPU, torch.float32) == 7.0


@pytest.mark.parametrize(("local_world", "threads"), [(1, 7), (2, 4), (3, 2), (100, 1)])
def test_processes_share_the_cores(monkeypatch, local_world, threads):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    try:
        torch.set_num_threads(7)
        share_cores(local_world)
        assert torch.get_num_threads() == threads
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        torch.set_num_threads(5)
        share_cores(local_world)
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


def test_free_memory_is_a_part_of_all() -> None:

    assert 0 < free_memory(CPU) < total_memory(CPU)
