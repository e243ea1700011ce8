"""Rotary positions on devices beside the formula."""

from __future__ import annotations

import pytest
import torch

from burnish.models.kernels.fused import rotate


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize(("heads", "width"), [(16, 128), (3, 24)])
def test_values_and_gradients_equal_the_formula(
    device: torch.device, dtype: torch.dtype, bound: float, heads: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(300, heads + 2, width, generator=generator).to(dtype)
    upstream = torch.randn(300, heads, width, generator=generator).to(dtype)
    angles = torch.randn(300, 1, width // 2, generator=generator).repeat(1, 1, 2)
    rotation = angles.cos(), angles.sin()

    rows = joined.to(device)[:, :heads].requires_grad_()  # not contiguous
    found = rotate(rows, (rotation[0].to(device), rotation[1].to(device)))
    found.backward(upstream.to(device))

    plain = joined[:, :heads].double().requires_grad_()
    first, second = plain.chunk(2, dim=-1)
    wanted = plain * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]
    wanted.backward(upstream.double())
    for ours, theirs in ((found, wanted), (rows.grad, plain.grad)):
        assert (ours.cpu().double() - theirs).norm() <= bound * theirs.norm()
