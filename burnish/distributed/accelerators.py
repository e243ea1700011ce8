"""Memory, speed and links of accelerators, from data sheets and drivers, without torch.

FLOP/s count dense 16-bit products with fp32 accumulation. Memory is the largest variant sold. Links count one direction.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of device."""

    flops: float
    """Operations per second of dense bf16 matrix products."""
    memory_gib: float
    """Memory in GiB."""
    bandwidth: float
    """Bandwidth of the device's memory, in bytes per second."""
    link: float
    """Bandwidth to other devices of the same machine, in bytes per second and one direction."""
    is_sm80_or_newer: bool = False
    """See `burnish.distributed.device.is_sm80_or_newer`."""


def _of(
    teraflops: float, memory_gib: float, bandwidth_gb: float, link_gb: float, sm80: bool = True
) -> Accelerator:
    return Accelerator(teraflops * 1e12, memory_gib, bandwidth_gb * 1e9, link_gb * 1e9, sm80)


ACCELERATORS = {
    "B200": _of(2250, 180, 8000, 900),
    "GB200": _of(2500, 186, 8000, 900),
    "H100": _of(989, 80, 3350, 450),
    "H100 NVL": _of(835, 94, 3900, 300),
    "H100 PCIe": _of(756, 80, 2000, 64),
    "H200": _of(989, 141, 4800, 450),
    "GH200": _of(989, 96, 4000, 450),
    "H800": _of(989, 80, 3350, 200),
    "H20": _of(148, 96, 4000, 450),
    "A100": _of(312, 80, 2039, 300),
    "A800": _of(312, 80, 2039, 200),
    "A10": _of(125, 24, 600, 32),
    "L40S": _of(362, 48, 864, 32),
    "L4": _of(121, 24, 300, 32),
    "RTX 4090": _of(165, 24, 1008, 32),
    # torch calls each of the two dies a device, so these numbers are for one die.
    "MI250X": _of(191.5, 64, 1638, 100, False),
    "MI300X": _of(1307, 192, 5300, 448, False),
    "MI325X": _of(1307, 256, 6000, 448, False),
    "Ascend910B2": _of(376, 64, 1600, 196, False),
    "Ascend910B3": _of(313, 64, 1600, 196, False),
}
"""Accelerators, each by a part of the name that its driver reports."""


def accelerator_named(name: str) -> Accelerator | None:
    """Look up a driver's name, such as `NVIDIA H100 80GB HBM3`."""
    matching = [key for key in ACCELERATORS if re.search(rf"\b{key}\b", name)]
    return ACCELERATORS[max(matching, key=len)] if matching else None


def nvidia_smi(query: str) -> str:
    """Query `nvidia-smi` about its first device; return "" if it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.splitlines()[0].strip()
    return ""
