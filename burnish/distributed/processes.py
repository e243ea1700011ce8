"""Start a run's rank: pick its device and open the process group of torchrun, Slurm or a lone process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from burnish.config.schema import DistributedConfig, EngineConfig
from burnish.distributed.device import keep_freed_pages, pick_device, share_cores
from burnish.distributed.environment import place_of
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.distributed.rank_place import RankPlace
from burnish.errors import UsageError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BACKENDS = {
    "cpu": "gloo",  # "cpu:gloo" would not be the group's default, and torch would warn when the group is destroyed
    "cuda": "cpu:gloo,cuda:nccl",  # also for ROCm: torch calls its devices cuda and RCCL nccl
    "xpu": "cpu:gloo,xpu:xccl",
    "npu": "cpu:gloo,npu:hccl",
}


def launch(
    fn: Callable[[Layout, torch.device], T],
    config: DistributedConfig,
    engine: EngineConfig | None = None,
) -> T:
    """Call `fn(layout, device)` as the rank that the environment describes. `engine` says how an accelerator computes.

    Raises `UsageError` for an unfit environment or machine, and `BurnishError` naming another rank that fails or dies.
    """
    place = place_of(os.environ)
    share_cores(place.layout.local_world)
    device = pick_device(place.layout.local_rank, place.own_device)
    # A run computes in torch's default modes, whatever modes the calling program has set.
    without = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), without, ExitStack() as stack:
        stack.enter_context(tuned(device, engine))
        if torch.get_default_device().type != "cpu":  # only if needed: this mode slows calls
            stack.enter_context(torch.device("cpu"))
        if place.layout.world == 1:  # torch's own excepthook prefixes "[rank0]" and stays
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
        group = process_group(device, config.timeout_seconds, place, config.stall_seconds)
        return fn(stack.enter_context(group), device)


@contextmanager
def tuned(device: torch.device, engine: EngineConfig | None = None) -> Iterator[None]:
    """Have a CPU waste less time inside the block, and an accelerator compute as `engine` or its defaults say."""
    if device.type != "cpu":
        from burnish.distributed.numerics import grow_segments, numerics

        if device.type == "cuda":
            grow_segments()
        with numerics(engine or EngineConfig()):
            yield
        return
    keep_freed_pages()
    from burnish.distributed.spinning import brief_while_crowded

    with brief_while_crowded():
        yield


@contextmanager
def process_group(
    device: torch.device,
    timeout_seconds: float,
    place: RankPlace | None = None,
    stall_seconds: float = 0.0,
) -> Iterator[Layout]:
    """Open the default process group inside the block.

    `timeout_seconds` bounds the meeting of the ranks and every collective; `stall_seconds` (0: never) ends a run that stands still.
    A lone process gets a group of one, which FSDP's mesh needs, and opens no port.

    Raises `UsageError` for a half-set environment, and `BurnishError` naming ranks that are missing, fail or die, or the
    collective that timed out.
    """
    place = place_of(os.environ) if place is None else place
    layout = place.layout
    timeout = timedelta(seconds=timeout_seconds)
    backend = backend_of(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    with ExitStack() as stack:
        if layout.world == 1:
            if stall_seconds:
                from burnish.distributed.stall import watching_alone

                stack.enter_context(watching_alone(stall_seconds))
            stack.push(_close_group)
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )
            yield layout
            return
        from burnish.distributed import meeting
        from burnish.distributed.failure_watch import FailureWatch
        from burnish.distributed.stall import StallLimits

        store = stack.enter_context(meeting.open_store(place, timeout))
        limits = StallLimits(stall_seconds, timeout_seconds)
        meeting.arrive(store, layout, "here")
        with meeting.named_absence(store, layout, timeout, "here"):
            watch = FailureWatch(layout, place.host, store, limits)
        stack.callback(watch.leave)
        stack.push(_close_group)
        stack.enter_context(watch.naming_failures())
        stack.enter_context(meeting.named_timeout(layout, timeout_seconds))
        # From here on the watch notices the death of any rank.
        meeting.await_everybody(store, layout, timeout, "watched")
        meeting.connect_lazily(layout)
        dist.init_process_group(
            backend,
            store=store,
            rank=layout.rank,
            world_size=layout.world,
            timeout=timeout,
            # NCCL connects here, so that it fails here, and not in the first collective of a step.
            device_id=device if device.type == "cuda" else None,
        )
        # A rank that left now would break the joining of the others.
        meeting.await_everybody(store, layout, timeout, "joined")
        yield meeting.by_machine(meeting.in_groups(layout, timeout), timeout)


def _close_group(error: type[BaseException] | None, *_: object) -> None:
    if not dist.is_initialized():
        return
    if error is not None and "nccl" in dist.get_backend_config():
        # destroy_process_group would wait for running collectives, which other ranks may never join.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """Return torch's backend string for a device. Raises `UsageError` without one."""
    if device.type not in _BACKENDS:
        raise UsageError(
            f"no process group can be made for devices of type {device.type}",
            have=device.type,
            want=" or ".join(_BACKENDS),
            do="hide the device, so that the CPU is used",
        )
    return _BACKENDS[device.type]


def wait_as_all(group: ProcessGroup) -> None:
    """Give a group the default group's time-out, not torch's 10 or 30 minutes."""
    everybody = dist.distributed_c10d._get_default_group()
    for device in everybody._device_types:
        backend = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):  # XCCL, HCCL and a fake group have none
            backend._set_default_timeout(everybody._get_backend(device).options._timeout)


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The torch engine's groups of this rank.

    Processes are a grid of replicas × shard × sequence × tensor, the last running fastest, since tensor parallelism communicates in
    every layer.
    """

    weights: DeviceMesh
    """(replicas, shard · sequence): weights are replicated along the first dim and sharded along the second."""
    sequence: ProcessGroup | None
    """The ranks that share the tokens of a micro-batch; None for 1."""
    tensor: ProcessGroup | None
    """The ranks that share the matrices of each layer; None for 1."""
    arena: Arena
    """Host memory for offloading."""
    of_experts: DeviceMesh | None = None
    """(replicas, shard, experts), with neighbours along the last dim, which exchange tokens for experts; None for 1."""

    @classmethod
    def of(cls, layout: Layout, replicas: int, device: torch.device, experts: int = 1) -> Mesh:
        """Make the groups. The layout's sizes, `replicas` and ranks that share `experts` must divide its world. Collective."""
        shards = layout.world // (replicas * layout.tensor)
        grid = init_device_mesh(
            device.type,
            (replicas, shards, layout.tensor),
            mesh_dim_names=("replicas", "shard", "tensor"),
        )
        tensor = grid["tensor"].get_group() if layout.tensor > 1 else None
        sequence = None
        if layout.sequence > 1:
            shape = (layout.data_size, layout.sequence, layout.tensor)
            names = ("data", "sequence", "tensor")
            shared = init_device_mesh(device.type, shape, mesh_dim_names=names)
            sequence = shared["sequence"].get_group()
        weights = grid["replicas", "shard"]
        of_experts = None
        if experts > 1:
            whole = init_device_mesh(
                device.type,
                (replicas, shards // experts, experts, layout.tensor),
                mesh_dim_names=("replicas", "shard", "experts", "tensor"),
            )
            of_experts = whole["replicas", "shard", "experts"]
        groups = [*weights.get_all_groups(), *(of_experts.get_all_groups() if of_experts else ())]
        for group in (*groups, tensor, sequence):
            if group is not None:
                wait_as_all(group)
        return cls(weights, sequence, tensor, Arena(device), of_experts)
