"""The split against the format's own formula in numpy, over all bit patterns that matter."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from burnish.boxes import tensor_reader
from burnish.checkpoint import write_plan as split
from burnish.checkpoint.write_plan import add_residual
from burnish.engines.optim.optimizer import break_ties


def rounded(x):
    into = torch.empty(x.shape, dtype=torch.bfloat16)
    split.rounded(x, into)
    return into


def residual(x):
    into = torch.empty(x.shape, dtype=torch.int16)
    split.residual(x, into)
    return into


def by_the_page(x):
    wide = x.astype(np.uint64)
    b = ((wide + 0x8000) >> 16) & 0xFFFF
    r = (wide - (b << 16)) & 0xFFFFFFFF
    return b.astype(np.uint16), r.astype(np.uint32).view(np.int32)


def check(x):
    weights = torch.from_numpy(x.view(np.float32).copy())
    b, r = by_the_page(x)
    assert np.array_equal(rounded(weights).view(torch.int16).numpy().view(np.uint16), b)
    assert np.array_equal(residual(weights).numpy().astype(np.int32), r)
    again = torch.empty_like(weights).copy_(rounded(weights))
    add_residual(residual(weights), again)
    assert np.array_equal(again.view(torch.int32).numpy().view(np.uint32), x)


def test_every_upper_half_with_the_lower_halves_around_the_tie():
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(upper | np.uint32(lower))


def test_every_lower_half_at_the_edges_of_the_number_line():
    lower = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0x0000, 0x8000, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF, 0xFF80, 0xFFFF):
        check(np.uint32(upper << 16) | lower)


@given(hnp.arrays(np.uint32, st.integers(1, 64), elements=st.integers(0, (1 << 32) - 1)))
def test_any_bits(x):
    check(x)


def test_the_model_is_torchs_bf16_except_for_ties():
    weights = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    is_tie = (weights.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded(weights)[~is_tie], weights.bfloat16()[~is_tie])


def test_without_ties_the_model_is_torchs_bf16():
    upper = torch.arange(1 << 16, dtype=torch.int64)
    upper = upper[(upper & 0x7F80) != 0x7F80] << 16  # neither infinities nor NaN
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = (upper | lower).to(torch.int32)
        weights = bits.clone().view(torch.float32).view(2, -1)
        break_ties([weights])
        assert torch.equal(rounded(weights), weights.bfloat16())
        assert torch.equal(weights.bfloat16(), bits.view(torch.float32).view(2, -1).bfloat16())
        is_moved = (lower == 0x8000) & (upper >> 16 & 1 == 0)
        assert torch.equal(bits - weights.view(-1).view(torch.int32), is_moved.to(torch.int32))


def test_strided_weights():
    base = torch.randn(8, 10)
    x = base[:, ::2]
    again = torch.zeros(8, 10)[:, 1::2].copy_(rounded(x))
    add_residual(residual(x), again)
    assert torch.equal(again, x)
    upper = torch.zeros(8, 10, dtype=torch.bfloat16)
    split.rounded(x, upper[:, 1::2])
    assert torch.equal(upper[:, 1::2], rounded(x))
    assert not upper[:, ::2].any()


@given(st.integers(0, 3), st.integers(-2, 2))
def test_sizes_around_a_chunk(chunks, more):
    size = max(0, chunks * tensor_reader._CHUNK + more)
    check(np.arange(size, dtype=np.uint32) * np.uint32(2654435761))
