"""Triton kernels for the small work between the products of a decoding step."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from burnish.models.kernels.triton_rotation import rotate_halves

_GATE_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    joined,
    query_weight,
    key_weight,
    cosines,
    sines,
    places,
    queries,
    keys,
    values,
    epsilon,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    normed: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    width = 2 * half
    column = tl.arange(0, block)
    inside = column < half
    source = joined + (row * (heads + 2 * kv_heads) + head) * width + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        if normed:
            weight = query_weight + column
            if head >= heads:
                weight = key_weight + column
            square = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
            inverse = tl.rsqrt(square / width + epsilon)
            first *= inverse * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
            second *= inverse * tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        angle = row * width + column
        first, second = rotate_halves(
            first, second, cosines + angle, sines + angle, half, inside, False
        )
    place = tl.load(places + row).to(tl.int64)
    target = queries + (row * heads + head) * width
    if head >= heads:
        target = keys + (place * kv_heads + head - heads) * width
    if head >= heads + kv_heads:
        target = values + (place * kv_heads + head - heads - kv_heads) * width
    target += column
    tl.store(target, first.to(queries.dtype.element_ty), mask=inside)
    tl.store(target + half, second.to(queries.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(joined, result, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(joined + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(result + row * width + column, value.to(result.dtype.element_ty), mask=inside)


def rotate_and_write(
    joined: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
    rotation: tuple[Tensor, Tensor],
    places: Tensor,
    pools: tuple[Tensor, Tensor],
) -> Tensor:
    """Return rotated queries [n, heads, d] of contiguous `joined` [n, heads + 2 kv_heads, d]; write keys and values to rows `places` [n].

    `pools` are contiguous [rows, kv_heads, d]. `weights` [d] are those of the queries' and keys' RMSNorm, if any. `rotation` is as
    `rotation_of` returns it, [n, 1, d] fp32. Computes in fp32 and rounds once.
    """
    count, all_heads, width = joined.shape
    kv_heads = pools[0].shape[1]
    heads = all_heads - 2 * kv_heads
    queries = joined.new_empty((count, heads, width))
    half = width // 2
    launched: Any = _rotate_kernel[(count, all_heads)]
    launched(
        joined,
        *(weights or (joined, joined)),
        *(part.contiguous() for part in rotation),
        places,
        queries,
        *pools,
        epsilon,
        heads,
        kv_heads,
        half,
        weights is not None,
        triton.next_power_of_2(half),
        num_warps=1,
    )
    return queries


def silu_gate(joined: Tensor) -> Tensor:
    """Return silu(g) u [n, m] of contiguous `joined` [n, 2 m], which is [g, u]. Computes in fp32 and rounds once."""
    count, both = joined.shape
    width = both // 2
    result = joined.new_empty((count, width))
    launched: Any = _gate_kernel[(count, triton.cdiv(width, _GATE_BLOCK))]
    launched(joined, result, width, _GATE_BLOCK)
    return result
