"""Grouped experts against one expert after the other by plain autograd: outputs and every gradient, whoever gets no rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burnish.engines.megatron.host import megatron_called
from burnish.engines.megatron.modules import GroupedExperts, TransformerConfig

HIDDEN = 16
COUNTS = {"uneven": [3, 0, 7, 1], "one has all": [0, 0, 11, 0], "nobody": [0, 0, 0, 0]}
WIDTHS = {"aligned": 8, "not aligned": 6}
"""Bytes of a row are, or are not, a multiple of what grouped products want."""


def make_experts(width: int, dtype: torch.dtype) -> GroupedExperts:
    with megatron_called():
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            num_moe_experts=4,
            moe_ffn_hidden_size=width,
            activation_func=functional.silu,
            params_dtype=dtype,
        )
        alone = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
        experts = GroupedExperts(4, config, pg_collection=alone)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return experts


def make_inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.rand(rows, generator=generator).requires_grad_()


def by_hand(experts: GroupedExperts, rows: Tensor, counts: list[int], weights: Tensor) -> Tensor:
    found = []
    for number, (own, weight) in enumerate(
        zip(rows.split(counts), weights.split(counts), strict=True)
    ):
        gate, up = functional.linear(own, experts.linear_fc1.weight[number]).chunk(2, -1)
        inner = (functional.silu(gate) * up * weight[:, None]).to(own.dtype)
        found.append(functional.linear(inner, experts.linear_fc2.weight[number]))
    return torch.cat(found)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_they_are_each_expert_by_itself(
    counts: str, width: str, dtype: torch.dtype, accumulated: bool
) -> None:
    """`accumulated`: gradients are added to what Megatron's buffers hold, in fp32."""
    experts, sizes = make_experts(WIDTHS[width], dtype), COUNTS[counts]
    parameters = list(experts.parameters())
    rows, weights = make_inputs(sum(sizes), dtype)
    wanted = by_hand(experts, rows, sizes, weights)
    ascent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    gradients = torch.autograd.grad(wanted, [rows, weights, *parameters], ascent)
    if accumulated:
        for parameter in parameters:
            parameter.main_grad = torch.ones(parameter.shape)  # type: ignore[attr-defined]
    found, bias = experts(rows, torch.tensor(sizes), weights)
    found.backward(ascent)
    assert bias is None
    torch.testing.assert_close(found, wanted)
    of_inputs, of_parameters = [rows.grad, weights.grad], [p.grad for p in parameters]
    if accumulated:
        assert all(p.grad_added_to_main_grad for p in parameters)  # type: ignore[attr-defined]
        of_parameters = [(p.main_grad - 1).to(dtype) for p in parameters]  # type: ignore[attr-defined]
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype is torch.bfloat16 else {}
    for mine, theirs in zip(of_inputs + of_parameters, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
