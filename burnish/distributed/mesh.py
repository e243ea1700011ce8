"""The torch engine's grid of processes: replicas × shard × sequence × tensor, the last running fastest.

Tensor parallelism communicates in every layer, so its ranks are neighbours on one machine. Weights
are sharded over shard × sequence together. Groups are passed on; nothing looks one up by name.
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
    """This rank's groups, and the host memory that its engines share."""

    weights: DeviceMesh
    """(replicas, shard · sequence): weights are replicated along the first dim and sharded along the second."""
    sequence: ProcessGroup | None
    """The ranks that share the tokens of a micro-batch; None for 1."""
    tensor: ProcessGroup | None
    """The ranks that share the matrices of each layer; None for 1."""
    arena: Arena
    """Host memory for offloading."""

    @classmethod
    def of(cls, layout: Layout, replicas: int, device: torch.device) -> Mesh:
        """Make the groups. Collective. The layout's sizes and `replicas` must divide its world."""
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
