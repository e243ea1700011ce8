"""What lets Megatron run without CUDA: there inside the block alone, and not at all where there is CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.ranks.processes import run_ranks
from torch import Tensor
from torch.distributed import group
from torch.overrides import _len_torch_function_stack

from burnish.distributed.layout import Layout
from burnish.engines.megatron.host import _substitutions, mappings, on_host

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")


def replaced() -> list[Any]:
    """What stands now behind every name that is ever replaced."""
    return [getattr(place, name) for place, name, _ in _substitutions()]


def test_where_there_is_cuda_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before, modes = replaced(), _len_torch_function_stack()
    with on_host():
        assert all(now is then for now, then in zip(replaced(), before, strict=True))
        assert _len_torch_function_stack() == modes


def fail_on_host(before: Sequence[Any]) -> None:
    with on_host(), on_host():
        assert not any(now is then for now, then in zip(replaced(), before, strict=True))
        raise ZeroDivisionError


@without_cuda
def test_after_the_block_all_is_as_before() -> None:
    before, modes = replaced(), _len_torch_function_stack()
    with pytest.raises(ZeroDivisionError):
        fail_on_host(before)
    assert all(now is then for now, then in zip(replaced(), before, strict=True))
    assert _len_torch_function_stack() == modes


@without_cuda
def test_tensors_for_cuda_are_on_the_cpu_and_say_otherwise() -> None:
    with on_host():
        made = torch.zeros(2, dtype=torch.bfloat16, device="cuda")
        also = torch.empty(2, device=torch.cuda.current_device()).cuda()
        assert (made.device.type, also.device.type) == ("cpu", "cpu")
        assert made.type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2, device="cpu").type() == "torch.cuda.FloatTensor"
    assert made.type() == "torch.BFloat16Tensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def exchange_rank(layout: Layout, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = torch.full((sizes[layout.rank], 2), float(layout.rank + 1))
    everywhere = torch.arange(2.0 * sum(sizes)).view(-1, 2) * (layout.rank + 1)
    with on_host():
        return (
            mappings._gather_along_first_dim(rows, group.WORLD, sizes),
            mappings._reduce_scatter_along_first_dim(everywhere, group.WORLD, sizes),
        )


@without_cuda
def test_pieces_of_different_sizes_are_exchanged_over_gloo() -> None:
    sizes = [3, 1]
    whole = torch.arange(8.0).view(-1, 2) * 3
    for found, mine in zip(run_ranks(exchange_rank, 2, sizes), whole.split(sizes), strict=True):
        assert torch.equal(found[0], torch.tensor([[1.0, 1.0]] * 3 + [[2.0, 2.0]]))
        assert torch.equal(found[1], mine)
