"""fp32 weights as a bf16 model and what is missing from it, in four bytes together.

With X the bits of x as uint32: B = (X + 0x8000) >> 16 is the bf16 that the model directory holds
(nearest, ties away from zero in magnitude: one ulp from torch's ties-to-even, in exact ties only),
and R = X - (B << 16), which fits int16, is the residual. X = (B << 16) + R (mod 2^32) gives back
every bit pattern, NaN and infinities included. A NaN with all of its upper mantissa bits set and
more than half of its lower ones reads as a zero or a NaN of the other sign in B alone; a step that
holds any NaN is marked unhealthy by those who save it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements that a processor's cache holds between two operations


def rounded(x: Tensor, into: Tensor) -> None:
    """Write B, the bf16 that the model directory holds, of fp32 weights into memory of the same shape."""
    for bits, upper in _chunks(x.detach().view(torch.int32), into.view(torch.int16)):
        upper.copy_(torch.add(bits, 0x8000).bitwise_right_shift_(16))


def residual(x: Tensor, into: Tensor) -> None:
    """Write R, the lower half of x's bits, which is what B lacks, into int16 memory of the same shape."""
    into.copy_(x.detach().view(torch.int32))


def add_residual(x: Tensor, rest: Tensor) -> None:
    """Make x, fp32 that was filled from B, exact by adding R to its bits, in place."""
    for bits, lower in _chunks(x.detach().view(torch.int32), rest.to(x.device)):
        bits.add_(lower)


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The two side by side, in chunks where both lie in a processor's memory without gaps."""
    if a.is_cpu and b.is_cpu and a.is_contiguous() and b.is_contiguous():
        flat = (torch.split(each.view(-1), _CHUNK) for each in (a, b))
        yield from zip(*flat, strict=True)
    else:
        yield a, b
