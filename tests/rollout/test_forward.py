"""Products of the generator: those of torch, to the last bit, with the weights of the last refresh."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from burnish.rollout.builtin.forward import PackedLinear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 128, 300])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_a_product_is_that_of_torch(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 72, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 72, generator=generator).to(dtype)
    product = PackedLinear(weight, bias)
    assert torch.equal(product(x), linear(x, weight, bias))
    product.refresh()
    assert torch.equal(product(x), linear(x, weight, bias))


@torch.inference_mode()
def test_a_refresh_brings_new_weights() -> None:
    weight = torch.randn(64, 32, dtype=torch.bfloat16)
    product, x = PackedLinear(weight), torch.randn(5, 32, dtype=torch.bfloat16)
    product.refresh()
    weight.mul_(3)
    product.refresh()
    assert torch.equal(product(x), linear(x, weight))


@torch.inference_mode()
def test_parts_of_a_fused_weight_can_be_written_one_by_one() -> None:
    """As weights arrive: through views of the fused one."""
    weight = torch.zeros(64, 32, dtype=torch.bfloat16)
    product, x = PackedLinear(weight), torch.randn(5, 32, dtype=torch.bfloat16)
    for part in weight.split(16):
        part.copy_(torch.randn(16, 32))
    product.refresh()
    assert torch.equal(product(x), linear(x, weight))
