"""Name the kernels that an NVIDIA GPU would use if they were installed, and what a run without them costs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch

from burnish.distributed.device import is_sm80_or_newer, missing_compiler
from burnish.errors import install


class MissingKernels(NamedTuple):
    """Kernels that are not there."""

    found: str
    cost: str
    """Estimates, counted from bytes and operations."""
    do: str
    """The command that installs them."""


def missing_kernels(device: torch.device) -> Iterator[MissingKernels]:
    """Yield what is missing for training on a device."""
    if not is_sm80_or_newer(device):
        return
    if lack := missing_compiler():
        yield MissingKernels(
            f"Triton cannot compile: there is no {lack}",
            "log-probs take about 14 times the traffic of memory, and rotations 8 times",
            {
                "triton": "pip install triton",
                "C compiler": "apt-get install gcc, or set CC to a compiler",
                "Python.h": "apt-get install python3-dev",
            }[lack],
        )
    if find_spec("liger_kernel") is None:
        yield MissingKernels(
            "Liger's kernels are not installed",
            "steps of models below 2 billion parameters take about 1.02 times as long, and of Gemma's more",
            install("liger"),
        )
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    if is_hopper and find_spec("flash_attn_interface") is None:
        yield MissingKernels(
            "FlashAttention 3 is not installed",
            "steps take about 1.1 times as long with sequences of 8,192 tokens, and 1.5 times with 131,072",
            "pip install flash_attn_3, and set engine.flash_attention=FA3",
        )
