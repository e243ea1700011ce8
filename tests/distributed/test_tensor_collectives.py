"""Who is in which group, and that what goes through a collective comes back as its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks.processes import run_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.distributed.tensor_collectives import (
    all_gather_replicated,
    all_gather_rows,
    all_reduce_replicated,
    all_to_all,
    reduce_scatter_rows,
)

CPU = torch.device("cpu")
WORLD = 4


def groups_rank(layout: Layout) -> dict[str, list[int]]:
    mine = Layout(layout.rank, layout.world, sequence=2, tensor=2)
    mesh = Mesh.of(mine, 1, CPU)
    assert mesh.sequence is not None
    assert mesh.tensor is not None
    assert (mine.data_rank, mine.data_size) == (0, 1)
    copies = Mesh.of(Layout(layout.rank, layout.world, tensor=2), 2, CPU)
    assert copies.sequence is None
    return {
        "sequence": dist.get_process_group_ranks(mesh.sequence),
        "tensor": dist.get_process_group_ranks(mesh.tensor),
        "shard": dist.get_process_group_ranks(mesh.weights["shard"].get_group()),
        "replicas": dist.get_process_group_ranks(copies.weights["replicas"].get_group()),
    }


def test_tensor_ranks_are_neighbours_and_weights_are_cut_over_sequence_ranks() -> None:
    for rank, groups in enumerate(run_ranks(groups_rank, WORLD)):
        tensor = rank % 2
        assert groups == {
            "sequence": [tensor, tensor + 2],
            "tensor": [rank - tensor, rank - tensor + 1],
            "shard": [tensor, tensor + 2],
            "replicas": [tensor, tensor + 2],
        }


def waiting_rank(layout: Layout) -> set[float]:
    mesh = Mesh.of(Layout(layout.rank, layout.world, sequence=2, tensor=2), 1, CPU)
    groups = [dist.group.WORLD, mesh.sequence, mesh.tensor, *mesh.weights.get_all_groups()]
    return {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}


def test_all_groups_wait_as_long_as_is_configured() -> None:
    for waits in run_ranks(waiting_rank, WORLD, timeout=77.0):
        assert waits == {77.0}


@pytest.mark.parametrize("rank", range(8))
def test_neighbours_run_the_same_share(rank: int) -> None:
    layout = Layout(rank, 8, sequence=2, tensor=2)
    assert (layout.data_rank, layout.data_size, layout.sharing) == (rank // 4, 2, 4)


COLLECTIVES: dict[str, tuple[Callable[[Tensor, ProcessGroup], Tensor], tuple[int, ...]]] = {
    "all_to_all": (all_to_all, (2, 3, 4)),
    "all_gather_rows": (all_gather_rows, (3, 4)),
    "reduce_scatter_rows": (reduce_scatter_rows, (6, 4)),
}


def transposed_rank(layout: Layout) -> dict[str, tuple[float, float]]:
    """This rank's part of ⟨A x, y⟩ and of ⟨x, Aᵀ y⟩ for each collective A."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(layout.rank)
    found = {}
    for name, (collective, shape) in COLLECTIVES.items():
        x = torch.randn(shape, generator=generator).requires_grad_()
        result = collective(x, group)
        y = torch.randn(result.shape, generator=generator)
        result.backward(y)
        found[name] = (float((result * y).sum().detach()), float((x * x.grad).sum().detach()))
    return found


def test_gradients_go_back_through_collectives() -> None:
    ranks = run_ranks(transposed_rank, 2)
    for name in COLLECTIVES:
        forward, backward = (sum(rank[name][side] for rank in ranks) for side in (0, 1))
        assert forward == pytest.approx(backward, rel=1e-5), name


def joined_rank(layout: Layout) -> list[list[float]]:
    found = []
    for collective in (all_gather_replicated, all_reduce_replicated):
        values = torch.arange(2.0).add(10 * layout.rank).requires_grad_()
        result = collective(values, dist.group.WORLD)
        result.backward(torch.arange(1.0, 1.0 + len(result)))
        found += [result.tolist(), values.grad.tolist()]
    return found


def test_numbers_of_all_ranks_and_the_gradient_of_ones_own() -> None:
    everything, sums = [0.0, 1.0, 10.0, 11.0], [10.0, 12.0]
    assert run_ranks(joined_rank, 2) == [
        [everything, [1.0, 2.0], sums, [1.0, 2.0]],
        [everything, [3.0, 4.0], sums, [1.0, 2.0]],
    ]
