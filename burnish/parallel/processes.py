"""The processes of a run as one group that can talk.

One context manager opens the group that torchrun, Slurm or nobody asked for, and closes it whatever
happens. The group reduces tensors of the rank's device and of the CPU alike. Left out: what is said
over it (`burnish.parallel.collectives`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from burnish.errors import BurnishError, UsageError
from burnish.parallel.environment import Place, place_of
from burnish.parallel.layout import Layout

_BACKENDS = {"cpu": "", "cuda": ",cuda:nccl", "xpu": ",xpu:xccl", "npu": ",npu:hccl"}
# By device type; "cuda" is ROCm as well, whose library answers to the name nccl.


@contextmanager
def process_group(
    device: torch.device, timeout_seconds: float, place: Place | None = None
) -> Iterator[Layout]:
    """Open the default process group, yield this process's layout, destroy the group.

    `device` is where this rank computes; it becomes the current device before the group is made.
    `timeout_seconds` bounds every collective and the meeting of the ranks. `place` is read from the
    environment when not given. A lone process gets a group of one and meets nobody on any port.
    Raises `UsageError` for a half-set environment, `BurnishError` when the ranks do not meet.
    """
    place = place_of(os.environ) if place is None else place
    timeout = timedelta(seconds=timeout_seconds)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    dist.init_process_group(
        backend_of(device),
        store=_store(place, timeout),
        rank=place.layout.rank,
        world_size=place.layout.world,
        timeout=timeout,
    )
    try:
        yield place.layout
    finally:
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """The communication backends for tensors of this device and of the CPU."""
    if device.type not in _BACKENDS:
        raise UsageError(
            f"no process group can be made for devices of type {device.type}",
            have=device.type,
            want=" or ".join(_BACKENDS),
        )
    return "cpu:gloo" + _BACKENDS[device.type]


def _store(place: Place, timeout: timedelta) -> dist.Store:
    """Where the ranks leave each other their addresses."""
    layout = place.layout
    if layout.world == 1:
        return dist.HashStore()
    serves = layout.rank == 0 and not place.agent_store
    try:
        store = dist.TCPStore(
            place.host, place.port, layout.world, serves, timeout, wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        raise BurnishError(
            f"rank {layout.rank} cannot reach the other ranks", have=str(error)
        ) from error
    return dist.PrefixStore("burnish", store)
