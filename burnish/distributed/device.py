"""One device layer: CPU, CUDA, ROCm, Intel XPU and Ascend NPU through `torch.accelerator`.

Apple's MPS has no collectives, so Macs use the CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from burnish.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])

_MEASURE_SECONDS = 0.5
_MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)

_WITHOUT_FP64 = frozenset({"mps", "npu"})

_STATUS = Path("/proc/self/status")
# mallopt(3): M_MMAP_MAX 0, M_TRIM_THRESHOLD off, M_TOP_PAD 256 MiB.
_MALLOC_SETTINGS = ((-4, 0), (-1, -1), (-2, 256 << 20))


def uncompiled(function: Function) -> Function:
    """Keep `torch.compile` out of a function. The first call loads torch's compiler."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def pick_device(local_rank: int, own_device: bool = False) -> torch.device:
    """Return this local rank's accelerator, or the CPU.

    With `own_device` the launcher shows each process one device. Raises `UsageError` for more processes than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return torch.device("cpu")
    index = 0 if own_device else local_rank
    visible = torch.accelerator.device_count()
    if index >= visible:
        raise UsageError(
            f"there is no {accelerator.type} device for local rank {local_rank}",
            have=f"{visible} visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
            want="one device per process on each machine",
            do=f"start {visible} processes per machine, or make more devices visible",
        )
    return torch.device(accelerator.type, index)


def current_device() -> torch.device:
    """Return this thread's accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def has_matrix_units(device: torch.device) -> bool:
    """Return whether attention is fastest in bf16: on accelerators, and CPUs with Intel's AMX."""
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16"))


def has_bf16_products(device: torch.device) -> bool:
    """Return whether bf16 products have kernels. On CPUs without AVX-512 or AMX they are a hundred times slower than fp32."""
    if device.type != "cpu":
        return True
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_sm80_or_newer(device: torch.device) -> bool:
    """Return whether NVIDIA's Ampere kernels run."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def compiles_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run. Triton does not compile for devices before Ampere."""
    return is_sm80_or_newer(device) and not missing_compiler()


@cache
def missing_compiler() -> str:
    """Return what Triton lacks to compile kernels, or ""."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "C compiler"
    return "" if Path(sysconfig.get_path("include"), "Python.h").exists() else "Python.h"


def has_fp64(device: torch.device) -> bool:
    """Return whether the device has fp64."""
    return device.type not in _WITHOUT_FP64


def widest_float(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 on a device without it."""
    return torch.float64 if has_fp64(device) else torch.float32


def device_name(device: torch.device) -> str:
    """Return the device's name from the driver or /proc/cpuinfo."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator's queue is empty."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Release the memory that torch's allocator caches."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()


def used_memory(device: torch.device) -> int:
    """Return the bytes of tensors on an accelerator, or on the CPU the process's resident bytes."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    return 1024 * _field(_STATUS, "VmRSS:") or _peak_from_rusage()


def peak_memory(device: torch.device) -> int:
    """Return the peak of `used_memory` since `reset_peak_memory`."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return 1024 * _field(_STATUS, "VmHWM:") or _peak_from_rusage()


def total_memory(device: torch.device) -> int:
    """Return the bytes of the accelerator's or the machine's memory."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate, on a CPU within its control group."""
    if device.type != "cpu":
        # torch.accelerator's own functions raise for backends without memory hooks
        own = torch.get_device_module(device)
        cached = own.memory_reserved(device) - own.memory_allocated(device)
        return int(own.mem_get_info(device)[0] + cached)
    left = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024 or total_memory(device)
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        left = min(left, int(text) - _field(group / "memory.stat", "anon"))
    return left


def reset_peak_memory(device: torch.device) -> None:
    """Restart `peak_memory`. On the CPU this needs /proc."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    control = Path("/proc/self/clear_refs")
    if os.access(control, os.W_OK):
        control.write_text("5")  # proc(5): reset the peak resident set size


def _field(path: Path, field: str) -> int:
    text = path.read_text() if path.exists() else ""
    match = re.search(rf"^{field}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _peak_from_rusage() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of matrix products: tabulated for 16 bits, else measured."""
    if dtype.itemsize == 2:
        from burnish.distributed.accelerators import accelerator_named

        if known := accelerator_named(device_name(device)):
            return float(known.flops)
    return measured_matmul_peak(device, dtype)


@torch.no_grad()
def measured_matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best FLOP/s of square products within half a second."""
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
    """Divide the machine's cores among its processes, unless OMP_NUM_THREADS is set."""
    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(own_cores(local_world))


def own_cores(local_world: int) -> int:
    """Return the cores for each of the machine's processes, at least 1."""
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return max(1, cores // local_world)


def keep_freed_pages() -> None:
    """Let glibc's malloc keep freed memory, since page faults take a seventh of a CPU step's time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in _MALLOC_SETTINGS:
            mallopt(parameter, value)
