"""Where every process of a run begins, whoever started it: nobody, torchrun or Slurm.

All of them end in the same call of the same function, which learns from its layout which share of
the work is its own. Left out: starting processes; torchrun and srun do that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from burnish.config.schema import DistributedConfig
from burnish.distributed.device import keep_freed_pages, pick_device, share_cores
from burnish.distributed.environment import place_of
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group

T = TypeVar("T")


def launch(fn: Callable[[Layout, torch.device], T], config: DistributedConfig) -> T:
    """Call `fn(layout, device)` as one rank of the run that the environment describes.

    Picks the device, shares out the cores, and holds the process group open around the call. Raises
    what `fn` raises, `UsageError` for an environment or machine that does not fit, and
    `BurnishError` naming the rank when another one fails or dies.
    """
    place = place_of(os.environ)
    share_cores(place.layout.local_world)
    device = pick_device(place.layout.local_rank, place.own_device)
    if device.type == "cpu":
        keep_freed_pages()
    with process_group(device, config.timeout_seconds, place) as layout:
        return fn(layout, device)
