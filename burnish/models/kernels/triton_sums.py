"""A Triton kernel that adds up rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]
    values, order, starts, places, sums, width, block: tl.constexpr
):
    segment = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), tl.float32)
    for each in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
        row = tl.load(order + each)
        total += tl.load(values + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(places + segment)
    tl.store(sums + place * width + columns, total.to(sums.dtype.element_ty), mask=inside)


def add_segments(
    values: Tensor, order: Tensor, starts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return [count, ...] of which row `places[i]` is the sum of `values[order[starts[i] : starts[i + 1]]]`, and other rows are 0.

    Sums are in fp32, one row after the other. `order` [N], `starts` [S + 1] and `places` [S] are int64.
    """
    shape = (count, *values.shape[1:])
    make = torch.empty if len(places) == count else torch.zeros
    sums = make(shape, dtype=values.dtype, device=values.device)
    width = sums[0].numel() if count else 0
    if len(places) and width:
        launched: Any = _sums_kernel[(len(places), triton.cdiv(width, _BLOCK))]
        launched(values.contiguous(), order, starts, places, sums, width, _BLOCK)
    return sums
