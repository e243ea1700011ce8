"""The processes of an engine as a grid: replicas × shard × sequence × tensor, the last running fastest.

Neighbours talk most, so tensor parallelism, which talks in every layer, lies within a machine. The
weights are cut over shard × sequence together: ranks that share tokens hold different pieces of the
weights as any others do. Groups are made here and passed on; nothing looks one up by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.distributed.processes import wait_as_all


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The groups that this rank is in, and the host memory that engines in them share."""

    weights: DeviceMesh
    """(replicas, shard): the weights are the same along the first dim and cut along the second, which counts shard × sequence ranks."""
    sequence: ProcessGroup | None
    """The ranks that share the tokens of a micro-batch; None where each has its own."""
    tensor: ProcessGroup | None
    """The ranks that share the matrices of each layer; None where each has them whole."""
    arena: Arena
    """For what has to leave the device."""

    @classmethod
    def of(cls, layout: Layout, replicas: int, device: torch.device) -> Mesh:
        """Make the groups. Collective. The layout's sizes and `replicas` have to divide its world."""
        grid = init_device_mesh(
            device.type,
            (replicas, layout.world // (replicas * layout.tensor), layout.tensor),
            mesh_dim_names=("replicas", "shard", "tensor"),
        )
        tensor = grid["tensor"].get_group() if layout.tensor > 1 else None
        sequence = _sequence_group(layout, device)
        weights = grid["replicas", "shard"]
        for group in (*weights.get_all_groups(), tensor, sequence):
            if group is not None:
                wait_as_all(group)
        return cls(weights, sequence, tensor, Arena(device))


def _sequence_group(layout: Layout, device: torch.device) -> ProcessGroup | None:
    if layout.sequence == 1:
        return None
    grid = init_device_mesh(
        device.type,
        (layout.data_size, layout.sequence, layout.tensor),
        mesh_dim_names=("data", "sequence", "tensor"),
    )
    return grid["sequence"].get_group()
