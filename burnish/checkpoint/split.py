"""fp32 weights as a bf16 model and what is missing from it, in four bytes together.

With X the bits of x as uint32: B = (X + 0x8000) >> 16 is the bf16 that the model directory holds
(nearest, ties away from zero in magnitude: one ulp from torch's ties-to-even, in exact ties only),
and R = X - (B << 16), which fits int16, is the residual. X = (B << 16) + R (mod 2^32) gives back
every bit pattern, NaN and infinities included. A NaN with all of its upper mantissa bits set and
more than half of its lower ones reads as a zero or a NaN of the other sign in B alone; a step that
holds any NaN is marked unhealthy by those who save it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(x: Tensor) -> Tensor:
    """B: fp32 to bf16, as the model directory holds it. Same shape."""
    bits = x.detach().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def residual(x: Tensor) -> Tensor:
    """R: int16, the lower half of x's bits, which is what B lacks. Same shape."""
    return x.detach().view(torch.int32).to(torch.int16)


def add_residual(x: Tensor, rest: Tensor) -> None:
    """Make x, fp32 that was filled from B, exact by adding R to its bits, in place."""
    x.detach().view(torch.int32).add_(rest.to(x.device))
