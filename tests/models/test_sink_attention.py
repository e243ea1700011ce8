"""Flash attention with sinks, by torch's flash kernel of the CPU in place of the GPU's; tests/gpu has the GPU's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from models.test_span_attention import written_out
from support.nightly import draws
from torch import Tensor

from burnish.models.kernels.sink_attention import sink_attention

HEADS, KEY_HEADS, WIDTH, SCALING = 4, 2, 16, 0.3


def sequences(cu: Tensor, window: int) -> Iterator[tuple[slice, Tensor]]:
    """Each sequence's rows, and the bias of its scores."""
    edges = cu.tolist()
    for start, stop in pairwise(edges):
        age = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None, :]
        hidden = (age < 0) | (age > (window if window >= 0 else stop))
        yield slice(start, stop), torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def dense(rows: Tensor) -> Tensor:
    """[L, heads, d] as [1, HEADS, L, d]."""
    return rows.transpose(0, 1).repeat_interleave(HEADS // rows.shape[1], 0)[None]


def forward(query, key, value, cu, _, most, __, dropout, causal, debug, **options):
    output, lse = torch.empty_like(query), query.new_empty(HEADS, len(query), dtype=torch.float32)
    assert causal == (options["window_size_left"] < 0)
    assert (options["window_size_right"], dropout, debug) == (0, 0.0, False)
    for rows, bias in sequences(cu, options["window_size_left"]):
        parts = [dense(part[rows]) for part in (query, key, value)]
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *parts, attn_mask=bias.to(query.dtype), scale=options["scale"]
        )
        output[rows], lse[:, rows] = made[0][0].transpose(0, 1), made[1][0].view(HEADS, -1)
    return output, lse, query.new_empty(2), query.new_empty(0), query.new_empty(0)


def backward(
    upstream, query, key, value, output, lse, cu, _, most, __, dropout, causal, *___, **options
):
    gradients = [torch.zeros_like(part) for part in (query, key, value)]
    for rows, bias in sequences(cu, options["window_size_left"]):
        parts = [dense(part[rows]) for part in (upstream, query, key, value, output)]
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts,
            lse[None, :, rows],
            0.0,
            False,
            attn_mask=bias.to(query.dtype),
            scale=options["scale"],
        )
        for gradient, found in zip(gradients, made, strict=True):
            heads = gradient.shape[1]
            by_head = found[0].view(heads, HEADS // heads, -1, WIDTH).sum(1)
            gradient[rows] = by_head.transpose(0, 1)
    return tuple(gradients)


@pytest.fixture
def kernel_of_the_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@draws(30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 7]),
    seed=st.integers(0, 99),
)
def test_equals_the_formula(
    kernel_of_the_cpu: None, lengths: list[int], window: int | None, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    parts = [
        torch.randn(total, heads, WIDTH, generator=draws).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    sinks = torch.randn(HEADS, generator=draws).mul_(3).requires_grad_()
    upstream = torch.randn(total, HEADS, WIDTH, generator=draws)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    output, _ = sink_attention(*parts, sinks, cu, max(lengths), SCALING, window)
    output.backward(upstream)
    exact_sinks = torch.zeros(HEADS, dtype=torch.float64)
    for rows, _ in sequences(cu, -1):
        alone = [part[rows].transpose(0, 1)[None] for part in parts]
        expected, leaves = written_out([*alone, sinks], SCALING, window or total, None)
        expected.backward(dense(upstream[rows]).double())
        assert torch.allclose(output[rows].double(), expected[0].transpose(0, 1), atol=1e-5)
        for part, leaf in zip(parts, leaves, strict=False):
            exact = leaf.grad[0].transpose(0, 1)
            assert torch.allclose(part.grad[rows].double(), exact, atol=1e-4)
        exact_sinks += leaves[3].grad
    assert torch.allclose(sinks.grad.double(), exact_sinks, atol=1e-4)


def test_torch_finds_the_operator_right(kernel_of_the_cpu: None) -> None:
    parts = [torch.randn(9, heads, WIDTH).requires_grad_() for heads in (4, 2, 2)]
    sinks, cu = torch.randn(HEADS).requires_grad_(), torch.tensor([0, 4, 9]).int()
    torch.library.opcheck(sink_attention, (*parts, sinks, cu, 5, SCALING, None))
