"""A Triton kernel for rotary positions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_HEADS = 16
"""Heads of a token that one program rotates."""


@triton.jit  # type: ignore[untyped-decorator]
def rotate_halves(first, second, cosines, sines, half, inside, backward: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return both halves of a head in fp32, rotated by the angles that `cosines` and `sines` point to; `backward` rotates the other way."""
    of_first = first * tl.load(cosines, mask=inside, other=0.0)
    of_second = second * tl.load(cosines + half, mask=inside, other=0.0)
    second *= tl.load(sines, mask=inside, other=0.0)
    first *= tl.load(sines + half, mask=inside, other=0.0)
    if backward:
        second = -second
        first = -first
    return of_first - second, of_second + first


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    rows,
    cosines,
    sines,
    result,
    heads,
    row_stride,
    head_stride,
    half: tl.constexpr,
    backward: tl.constexpr,
    some: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * some + tl.arange(0, some)[:, None]
    column = tl.arange(0, block)[None, :]
    is_angle = column < half
    inside = (head < heads) & is_angle
    source = rows + row * row_stride + head * head_stride + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    angle = row * 2 * half + column
    first, second = rotate_halves(
        first, second, cosines + angle, sines + angle, half, is_angle, backward
    )
    target = result + (row * heads + head) * 2 * half + column
    tl.store(target, first.to(result.dtype.element_ty), mask=inside)
    tl.store(target + half, second.to(result.dtype.element_ty), mask=inside)


def rotate_heads(
    rows: Tensor, rotation: tuple[Tensor, Tensor], *, backward: bool = False
) -> Tensor:
    """Return `rows` [T, heads, d] rotated by `rotation_of`, or with `backward` the other way.

    Computes in fp32 and rounds once.
    """
    count, heads, width = rows.shape
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    result = torch.empty((count, heads, width), dtype=rows.dtype, device=rows.device)
    some = min(triton.next_power_of_2(heads), _MOST_HEADS)
    if count:
        launched: Any = _rotate_kernel[(count, triton.cdiv(heads, some))]
        launched(
            rows,
            *(part.contiguous() for part in rotation),
            result,
            heads,
            *rows.stride()[:2],
            width // 2,
            backward,
            some,
            triton.next_power_of_2(width // 2),
        )
    return result
