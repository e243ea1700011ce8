"""One device layer: CPU, CUDA, ROCm, Intel XPU and Ascend NPU through `torch.accelerator`.

Ascend's `torch_npu` is loaded by torch itself where it is installed. Apple's MPS is left out: it
has no collectives, so such a machine computes on its CPU. Also left out: placing tensors, which is
their owners' work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
import time
from pathlib import Path

import torch

from burnish.distributed.accelerators import accelerator_named
from burnish.errors import UsageError

_MEASURE_SECONDS = 0.5
_MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)

_WITHOUT_FP64 = frozenset({"mps", "npu"})

_MALLOC_SETTINGS = ((-4, 0), (-1, -1), (-2, 256 << 20))
# M_MMAP_MAX 0: nothing is mapped by itself; M_TRIM_THRESHOLD off; M_TOP_PAD 256 MiB.


def pick_device(local_rank: int, own_device: bool = False) -> torch.device:
    """This rank's device: the accelerator of its local rank, or the CPU of a machine without one.

    `own_device` says that the launcher shows every process one device of its own, which is then
    number 0 for all of them. Raises `UsageError` when there are more processes than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return torch.device("cpu")
    index, visible = 0 if own_device else local_rank, torch.accelerator.device_count()
    if index >= visible:
        raise UsageError(
            f"there is no {accelerator.type} device for local rank {local_rank}",
            have=f"{visible} visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
            want="one device per process on each machine",
            do=f"start {visible} processes per machine, or make more devices visible",
        )
    return torch.device(accelerator.type, index)


def has_matrix_units(device: torch.device) -> bool:
    """Whether torch's own attention is fastest in half precision: on every accelerator, and on CPUs with Intel's AMX.

    On other CPUs it is two to five times slower in bf16 than in fp32.
    """
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16"))


def has_bf16_products(device: torch.device) -> bool:
    """Whether there are kernels for matrix products in bf16: on every accelerator, and on CPUs with AVX-512 or AMX.

    On other CPUs torch computes them number by number, a hundred times slower than in fp32.
    """
    if device.type != "cpu":
        return True
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fp64(device: torch.device) -> bool:
    """Whether tensors on the device may be fp64: not on Ascend's NPUs, nor on Apple's MPS."""
    return device.type not in _WITHOUT_FP64


def device_name(device: torch.device) -> str:
    """The maker's name of the device, as drivers and /proc/cpuinfo give it."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device has run; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def used_memory(device: torch.device) -> int:
    """Bytes in use: by tensors on an accelerator, by the whole process (resident) on the CPU.

    Where the system does not tell (no /proc), the process's peak is given instead.
    """
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _process_status("VmRSS") or _peak_from_rusage()


def peak_memory(device: torch.device) -> int:
    """The most bytes in use since the last `reset_peak_memory`, or since the process began."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return _process_status("VmHWM") or _peak_from_rusage()


def total_memory(device: torch.device) -> int:
    """Bytes of memory that the device has; on the CPU, that the machine has."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reset_peak_memory(device: torch.device) -> None:
    """Start `peak_memory` again from what is in use. Without /proc a process's peak stays."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    control = Path("/proc/self/clear_refs")
    if os.access(control, os.W_OK):
        control.write_text("5")  # proc(5): reset the peak resident set size


def _process_status(field: str) -> int:
    """A field of /proc/self/status in bytes, 0 where there is none."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    match = re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _peak_from_rusage() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s this device can reach in matrix products of this dtype: from the table, or measured."""
    return known_peak(device_name(device), dtype) or measured_matmul_peak(device, dtype)


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense 16-bit matrix products by the device's name; None for what is not known."""
    if dtype not in {torch.bfloat16, torch.float16}:
        return None
    known = accelerator_named(name)
    return None if known is None else known.flops


@torch.no_grad()
def measured_matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of several square matrix products, found in about half a second.

    Sizes grow until the next one would take longer than the time that is left.
    """
    deadline = time.perf_counter() + _MEASURE_SECONDS
    best = 0.0
    for size in _MATMUL_SIZES:
        work = 2 * size**3
        if best and work / best > (deadline - time.perf_counter()) / 4:
            break
        left, right, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
        for _ in range(4):
            synchronize(device)
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            synchronize(device)
            best = max(best, work / (time.perf_counter() - start))
    return best


def share_cores(local_world: int) -> None:
    """Divide the machine's cores among its processes, unless OMP_NUM_THREADS says otherwise.

    torch gives every process as many threads as there are cores; several processes together then
    slow each other down several times over.
    """
    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // local_world))


def keep_freed_pages() -> None:
    """Tell glibc's malloc to keep freed memory for the next tensor instead of giving it back to the system.

    On a CPU every large tensor otherwise begins with page faults, about a seventh of a training
    step's time. Memory stays at its peak between steps. Nothing happens with another C library.
    See mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in _MALLOC_SETTINGS:
            mallopt(parameter, value)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
