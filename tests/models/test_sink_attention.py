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


def sequences(own: Tensor, cu: Tensor, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each sequence's queries and keys, and the bias of its scores."""
    for queries, keys in zip(pairwise(own.tolist()), pairwise(cu.tolist()), strict=True):
        asked, seen = queries[1] - queries[0], keys[1] - keys[0]
        age = torch.arange(seen - asked, seen)[:, None] - torch.arange(seen)[None, :]
        hidden = (age < 0) | (age > (window if window >= 0 else seen))
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        yield slice(*queries), slice(*keys), bias


def dense(rows: Tensor) -> Tensor:
    """[L, heads, d] as [1, HEADS, L, d]."""
    return rows.transpose(0, 1).repeat_interleave(HEADS // rows.shape[1], 0)[None]


def forward(query, key, value, own, cu, _, __, dropout, causal, debug, **options):
    output, lse = torch.empty_like(query), query.new_empty(HEADS, len(query), dtype=torch.float32)
    assert causal == (options["window_size_left"] < 0)
    assert (options["window_size_right"], dropout, debug) == (0, 0.0, False)
    for queries, keys, bias in sequences(own, cu, options["window_size_left"]):
        parts = [dense(query[queries]), dense(key[keys]), dense(value[keys])]
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *parts, attn_mask=bias.to(query.dtype), scale=options["scale"]
        )
        output[queries], lse[:, queries] = made[0][0].transpose(0, 1), made[1][0].view(HEADS, -1)
    return output, lse, query.new_empty(2), query.new_empty(0), query.new_empty(0)


def backward(
    upstream, query, key, value, output, lse, own, cu, _, __, dropout, causal, *___, **options
):
    gradients = [torch.zeros_like(part) for part in (query, key, value)]
    for queries, keys, bias in sequences(own, cu, options["window_size_left"]):
        rows = (queries, keys, keys)
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dense(upstream[queries]),
            *(dense(part[some]) for part, some in zip((query, key, value), rows, strict=True)),
            dense(output[queries]),
            lse[None, :, queries],
            0.0,
            False,
            attn_mask=bias.to(query.dtype),
            scale=options["scale"],
        )
        for gradient, some, found in zip(gradients, rows, made, strict=True):
            heads = gradient.shape[1]
            by_head = found[0].view(heads, HEADS // heads, -1, WIDTH).sum(1)
            gradient[some] = by_head.transpose(0, 1)
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
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 7]),
    seed=st.integers(0, 99),
)
def test_equals_the_formula(
    kernel_of_the_cpu: None, lengths: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    """Of sequences of which the last tokens, or all, have queries."""
    draws = torch.Generator().manual_seed(seed)
    own = torch.tensor([0, *(asked for asked, _ in lengths)]).cumsum(0).int()
    cu = torch.tensor([0, *map(sum, lengths)]).cumsum(0).int()
    asked, total = int(own[-1]), int(cu[-1])
    parts = [
        torch.randn(rows, heads, WIDTH, generator=draws).requires_grad_()
        for rows, heads in ((asked, HEADS), (total, KEY_HEADS), (total, KEY_HEADS))
    ]
    sinks = torch.randn(HEADS, generator=draws).mul_(3).requires_grad_()
    upstream = torch.randn(asked, HEADS, WIDTH, generator=draws)
    longest = int(own.diff().max()), int(cu.diff().max())
    output, _ = sink_attention(*parts, sinks, own, cu, *longest, SCALING, window)
    output.backward(upstream)
    exact_sinks = torch.zeros(HEADS, dtype=torch.float64)
    for queries, keys, _ in sequences(own, cu, -1):
        rows = (queries, keys, keys)
        alone = [part[some].transpose(0, 1)[None] for part, some in zip(parts, rows, strict=True)]
        expected, leaves = written_out([*alone, sinks], SCALING, window or total, None)
        expected.backward(dense(upstream[queries]).double())
        assert torch.allclose(output[queries].double(), expected[0].transpose(0, 1), atol=1e-5)
        for part, some, leaf in zip(parts, rows, leaves, strict=False):
            exact = leaf.grad[0].transpose(0, 1)
            assert torch.allclose(part.grad[some].double(), exact, atol=1e-4)
        exact_sinks += leaves[3].grad
    assert torch.allclose(sinks.grad.double(), exact_sinks, atol=1e-4)


def test_torch_finds_the_operator_right(kernel_of_the_cpu: None) -> None:
    parts = [
        torch.randn(rows, heads, WIDTH).requires_grad_() for rows, heads in ((7, 4), (9, 2), (9, 2))
    ]
    sinks = torch.randn(HEADS).requires_grad_()
    own, cu = torch.tensor([0, 4, 7]).int(), torch.tensor([0, 4, 9]).int()
    torch.library.opcheck(sink_attention, (*parts, sinks, own, cu, 4, 5, SCALING, None))
