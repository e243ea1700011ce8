"""Triton kernels for passes over logits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _transformed(raw, scale, bound, capped: tl.constexpr):  # type: ignore[no-untyped-def]
    # Returns z, and ∂z / ∂(raw logit) divided by `scale` and `bound`.
    z = raw.to(tl.float32) * scale
    slope = 1.0
    if capped:
        bounded = 2 * tl.sigmoid(2 * z) - 1  # tanh
        z = bounded * bound
        slope = 1 - bounded * bounded
    return z, slope


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits,
    columns,
    sums,
    rows,
    scale,
    bound,
    words: tl.constexpr,
    capped: tl.constexpr,
    block: tl.constexpr,
):
    # Milakov & Gimelshein, arXiv 1805.02867: if m grows to m', S' = a S and D' = a (D + (m - m') S), a = exp(m - m').
    row = tl.program_id(0).to(tl.int64)
    logits += row * words
    top = -3.0e38
    total = 0.0
    dot = 0.0
    for start in range(0, words, block):
        places = start + tl.arange(0, block)
        inside = places < words
        raw = tl.load(logits + places, mask=inside, other=0.0)
        z = _transformed(raw, scale, bound, capped)[0]
        higher = tl.maximum(top, tl.max(tl.where(inside, z, -3.0e38), axis=0))
        exponents = z - higher
        exponentials = tl.where(inside, tl.exp(exponents), 0.0)
        shrunk = tl.exp(top - higher)
        dot = shrunk * (dot + (top - higher) * total) + tl.sum(exponentials * exponents, axis=0)
        total = shrunk * total + tl.sum(exponentials, axis=0)
        top = higher
    column = tl.load(columns + row)
    chosen = tl.load(logits + tl.maximum(column, 0))
    chosen = _transformed(chosen, scale, bound, capped)[0] - top
    tl.store(sums + row, top)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, dot)
    tl.store(sums + 3 * rows + row, tl.where(column < 0, -float("inf"), chosen))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    logits,
    columns,
    known,
    stride,
    scale,
    bound,
    words: tl.constexpr,
    capped: tl.constexpr,
    uses_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * words
    places = tl.program_id(1) * block + tl.arange(0, block)
    inside = places < words
    raw = tl.load(logits + places, mask=inside, other=0.0)
    z, slope = _transformed(raw, scale, bound, capped)
    known += row
    log_p = z - tl.load(known)
    upstream = tl.load(known + stride)
    factor = upstream
    if uses_entropy:
        entropy = tl.load(known + 2 * stride)
        of_entropy = tl.load(known + 3 * stride)
        factor = upstream + (log_p + entropy) * of_entropy
    gradient = tl.where(places == tl.load(columns + row), upstream, 0.0) - tl.exp(log_p) * factor
    tl.store(logits + places, (gradient * slope).to(raw.dtype), mask=inside)


def softmax_sums(logits: Tensor, columns: Tensor, scale: float, bound: float | None) -> Tensor:
    """Return m, S, D and z_y - m [4, N] of contiguous `logits` [N, V]; see `LogprobOptions.factors`."""
    count, words = logits.shape
    sums = torch.empty(4, count, dtype=torch.float32, device=logits.device)
    if count:
        launched: Any = _sums_kernel[(count,)]
        capped = bound is not None
        launched(
            logits,
            columns,
            sums,
            count,
            scale,
            bound or 1.0,
            words,
            capped,
            _BLOCK,
            num_warps=_WARPS,
        )
    return sums


def write_gradients(
    logits: Tensor, columns: Tensor, known: Tensor, scale: float, bound: float | None
) -> None:
    """Write gradients over `logits`; see `burnish.models.logprobs` for `known`, whose rows are contiguous."""
    count, words = logits.shape
    launched: Any = _gradient_kernel[(count, triton.cdiv(words, _BLOCK))]
    launched(
        logits,
        columns,
        known,
        known.stride(0),
        scale,
        bound or 1.0,
        words,
        bound is not None,
        len(known) == 4,
        _BLOCK,
        num_warps=_WARPS,
    )
