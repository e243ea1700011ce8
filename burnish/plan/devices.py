"""Describe the devices of a plan: number, memory, speed."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from burnish.distributed.accelerators import ACCELERATORS, Accelerator, accelerator_named
from burnish.errors import UsageError

GIB = float(1 << 30)
PER_MACHINE = 8
"""Devices of a machine."""
NETWORK = 50e9
"""Bytes per second from one device to other machines."""
_CPU = Accelerator(flops=1e12, memory_gib=16, bandwidth=30e9, link=5e9)
_USABLE = 0.94
# Of an accelerator's memory. Driver, communication and fragmentation take the rest.
_SPEC = re.compile(r"(\d+)x([A-Za-z].*?)(?:-(\d+(?:\.\d+)?)G(?:i?B)?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices, with one process each."""

    count: int
    """How many."""
    name: str
    """The model, as `H100`; `CPU` for a process on a CPU."""
    memory: float
    """Bytes of each."""
    flops: float
    """Operations per second of bf16 matrix products."""
    bandwidth: float
    """Bytes per second to its own memory."""
    link: float
    """Bytes per second to other devices of the machine."""
    shared_cache: bool = False
    """Whether the generator stores each prompt once and in fp32, as on this machine's CPU."""

    @property
    def cpu(self) -> bool:
        """Whether they are processes on CPUs."""
        return self.name == "CPU"

    @property
    def usable(self) -> float:
        """Bytes of each that a run can have."""
        return self.memory * (1.0 if self.cpu else _USABLE)

    def __str__(self) -> str:
        """Return text such as `64 × H100 with 80 GiB`."""
        return f"{self.count} × {self.name} with {self.memory / GIB:.4g} GiB"


def parse_devices(
    text: str, memory_gib: float | None = None, teraflops: float | None = None
) -> Devices:
    """Read `64xH100-80G` or `2xCPU-24G`. The other arguments override memory and speed.

    Raises `UsageError` for another form, or an unknown device without memory and speed.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise UsageError(
            "the devices cannot be read",
            have=text,
            want="COUNTxNAME-MEMORY, as 64xH100-80G or 2xCPU-24G",
            do="correct --devices",
        )
    name = "CPU" if match[2].upper() == "CPU" else match[2]
    known = {_plain(key): value for key, value in ACCELERATORS.items()} | {"cpu": _CPU}
    device = known.get(_plain(name))
    if memory_gib is None and match[3]:
        memory_gib = float(match[3])
    for number in (memory_gib, teraflops):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(
                "the devices' memory or speed is not a positive number",
                have=f"{number:g}",
                want="a number above 0",
                do="correct --devices, --device-memory or --device-tflops",
            )
    if device is None:
        if memory_gib is None or teraflops is None:
            raise UsageError(
                f"there is no device {name} in the table",
                have=text,
                want=f"one of {', '.join(ACCELERATORS)}, CPU",
                do="give --device-memory GIB and --device-tflops N beside --devices",
            )
        device = Accelerator(teraflops * 1e12, memory_gib, 2e12, 64e9)
    memory = device.memory_gib if memory_gib is None else memory_gib
    if teraflops is not None:
        device = replace(device, flops=teraflops * 1e12)
    return _devices(int(match[1]), name, memory * GIB, device)


def devices_here(processes: int, local_processes: int) -> Devices | None:
    """Return one device of this machine per process; None if its accelerator is not in the table.

    Processes without an accelerator share the machine's memory.
    """
    if (found := _nvidia()) is not None:
        name, memory = found
        known = accelerator_named(name)
        if known is None:
            return None
        return _devices(processes, name, memory, known)
    if any(Path(node).exists() for node in ("/dev/kfd", "/dev/davinci0", "/dev/accel/accel0")):
        return None
    return _devices(processes, "CPU", _host_memory() / local_processes, _CPU)


def _devices(count: int, name: str, memory: float, like: Accelerator) -> Devices:
    cpuinfo = Path("/proc/cpuinfo")
    # As `burnish.distributed.device.has_matrix_units`, without torch.
    has_units = cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text(errors="replace").split()
    shared = name == "CPU" and not has_units
    return Devices(count, name, memory, like.flops, like.bandwidth, like.link, shared)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _nvidia() -> tuple[str, float] | None:
    """Return the first visible NVIDIA device's name and bytes, or None."""
    command = shutil.which("nvidia-smi")
    if command is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        name, memory = done.stdout.splitlines()[0].rsplit(",", 1)
        return name.strip(), float(memory) * (1 << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _host_memory() -> float:
    """Return the machine's bytes of memory, or its control group's limit."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, float(text))
