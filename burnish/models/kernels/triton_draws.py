"""Triton kernels that draw tokens; `burnish.rollout.builtin.sampling` has the definitions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Keys of a program.
_KEYS = 128
# A program holds the sums of a row's blocks. With 16 warps a thread has too few registers for them.
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _uniforms_kernel(keys, counts, numbers, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < size
    count = tl.load(counts + places, mask=inside, other=0).to(tl.uint64)
    z = tl.load(keys + places, mask=inside, other=0).to(tl.uint64)
    z += (count + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    number = (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    tl.store(numbers + places, number, mask=inside)


@triton.jit
def _first_above(values, running, goal, places, last):  # type: ignore[no-untyped-def]
    """Return the first place whose running sum is above the goal and whose value is not 0; `last` if there is none."""
    total = tl.sum(tl.where(places == last, running, 0.0), 0)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    goal = tl.where(goal > below, below, goal)
    return tl.min(tl.where((running > goal) & (values > 0), places, last), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _invert_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    masses,
    sums,
    numbers,
    tokens,
    logs,
    words,
    blocks,
    size: tl.constexpr,
    most: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, most)
    values = tl.load(sums + row * blocks + places, mask=places < blocks, other=0.0).to(tl.float64)
    running = tl.cumsum(values, 0)
    last = blocks - 1
    total = tl.sum(tl.where(places == last, running, 0.0), 0)
    goal = tl.load(numbers + row) * total
    block = _first_above(values, running, goal, places, last)
    goal -= tl.sum(tl.where(places == block, running - values, 0.0), 0)
    inner = tl.arange(0, size)
    token = block * size + inner
    inside = tl.load(masses + row * words + token, mask=token < words, other=0.0).to(tl.float64)
    place = _first_above(inside, tl.cumsum(inside, 0), goal, inner, size - 1)
    tl.store(tokens + row, tl.minimum(block * size + place, words - 1).to(tl.int64))
    tl.store(logs + row, tl.log(total).to(tl.float32))


def uniform_numbers(keys: Tensor, counts: Tensor) -> Tensor:
    """Compute `sampling.uniforms` with the same bits."""
    numbers = torch.empty(len(keys), dtype=torch.float64, device=keys.device)
    if len(keys):
        launched: Any = _uniforms_kernel[(triton.cdiv(len(keys), _KEYS),)]
        launched(
            keys.contiguous(),
            counts.contiguous(),
            numbers,
            len(keys),
            _KEYS,
            enable_fp_fusion=False,
        )
    return numbers


def invert(masses: Tensor, sums: Tensor, numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return tokens [n] int64 and log totals [n] fp32 for contiguous fp32 `masses` [n, V] and `numbers` [n] fp64.

    `sums` [n, M] are of blocks of `width` masses. See `sampling._invert`. Only the order of additions in fp64 may differ.
    """
    rows, words = masses.shape
    blocks = sums.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=masses.device)
    logs = torch.empty(rows, dtype=torch.float32, device=masses.device)
    if rows:
        launched: Any = _invert_kernel[(rows,)]
        launched(
            masses,
            sums,
            numbers,
            tokens,
            logs,
            words,
            blocks,
            width,
            triton.next_power_of_2(blocks),
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return tokens, logs
