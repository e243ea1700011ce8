"""The devices that a plan is for: how many, how large, how fast.

Named as `64xH100-80G`, `8xCPU-24G`, or any other name with memory and speed given beside it. Left out: asking torch,
which a plan does not load.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from burnish.distributed.accelerators import ACCELERATORS, Accelerator, accelerator_named
from burnish.errors import UsageError

GIB = float(1 << 30)
PER_MACHINE = 8
"""Devices of a machine, where nothing else is known."""
NETWORK = 50e9
"""Bytes per second of a device to those of other machines, in one direction."""
_CPU = Accelerator(flops=1e12, memory_gib=16, bandwidth=30e9, link=5e9)
"""One process on a CPU, roughly."""
_USABLE = 0.94
"""Of an accelerator's memory; its driver, communication and fragments take the rest."""
_SPEC = re.compile(r"(\d+)x([A-Za-z].*?)(?:-(\d+(?:\.\d+)?)G(?:i?B)?)?", re.IGNORECASE)
_ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices, one process each."""

    count: int
    """How many."""
    name: str
    """What they are."""
    memory: float
    """Bytes of each."""
    flops: float
    """Operations per second of bf16 matrix products."""
    bandwidth: float
    """Bytes per second between each and its memory."""
    link: float
    """Bytes per second of each to the others of its machine."""

    @property
    def cpu(self) -> bool:
        """Whether they are processes on CPUs."""
        return self.name == "CPU"

    @property
    def exact_cache(self) -> bool:
        """Whether completions share their prompts in fp32 (`burnish.rollout.builtin.kv_cache`); of CPUs, what this machine's would do."""
        return self.cpu and not _has_matrix_units()

    @property
    def usable(self) -> float:
        """Bytes of each that a run can have."""
        return self.memory * (1.0 if self.cpu else _USABLE)

    def __str__(self) -> str:
        """As `64 × H100 with 80 GiB`."""
        return f"{self.count} × {self.name} with {self.memory / GIB:.4g} GiB"


def parse_devices(
    text: str, memory_gib: float | None = None, teraflops: float | None = None
) -> Devices:
    """What `64xH100-80G` stands for; a memory and a speed given beside it count more.

    Raises `UsageError` for another form, and for an unknown device of which not both are given.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise UsageError(
            "the devices cannot be read",
            have=text,
            want="COUNTxNAME-MEMORY, as 64xH100-80G or 2xCPU-24G",
            do="correct --devices",
        )
    count, name = int(match[1]), match[2]
    known = _known(name)
    if memory_gib is None and match[3]:
        memory_gib = float(match[3])
    for what, number in (("memory", memory_gib), ("speed", teraflops)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(
                f"the devices' {what} is no amount",
                have=f"{number:g}",
                want="a number above 0",
                do="correct --devices, --device-memory or --device-tflops",
            )
    if known is None:
        if memory_gib is None or teraflops is None:
            raise UsageError(
                f"there is no device {name} in the table",
                have=text,
                want=f"one of {', '.join(ACCELERATORS)}, CPU",
                do="give --device-memory GIB and --device-tflops N beside --devices",
            )
        known = Accelerator(teraflops * 1e12, memory_gib, 2e12, 64e9)
    return Devices(
        count,
        "CPU" if known is _CPU else name,
        (known.memory_gib if memory_gib is None else memory_gib) * GIB,
        known.flops if teraflops is None else teraflops * 1e12,
        known.bandwidth,
        known.link,
    )


def _known(name: str) -> Accelerator | None:
    """By a name as it is typed: case, spaces and dashes do not matter."""
    plain = {_plain(key): value for key, value in ACCELERATORS.items()} | {"cpu": _CPU}
    return plain.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def devices_here(processes: int, local_processes: int) -> Devices | None:
    """One device of this machine for each process of a run; None where there is an accelerator that is not known.

    NVIDIA's are asked for with `nvidia-smi`; without an accelerator processes share the machine's memory.
    """
    if (found := _nvidia()) is not None:
        name, memory = found
        known = accelerator_named(name)
        if known is None:
            return None
        return Devices(processes, name, memory, known.flops, known.bandwidth, known.link)
    if any(Path(node).exists() for node in ("/dev/kfd", "/dev/davinci0", "/dev/accel/accel0")):
        return None
    return Devices(
        processes,
        "CPU",
        _host_memory() / local_processes,
        _CPU.flops,
        _CPU.bandwidth,
        _CPU.link,
    )


def _has_matrix_units() -> bool:
    """What `burnish.distributed.device.has_matrix_units` says of this machine's processor, without torch."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text(errors="replace").split()


def _nvidia() -> tuple[str, float] | None:
    """Name and bytes of the first visible device; None where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
        name, memory = done.stdout.splitlines()[0].rsplit(",", 1)
        return name.strip(), float(memory) * (1 << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _host_memory() -> float:
    """Bytes of this machine's memory, or of the control group that limits this process."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, float(text))
