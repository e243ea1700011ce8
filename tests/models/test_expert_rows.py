"""Experts whose rows are gathered in both passes, against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts.engine import assert_relative
from support.models.tiny import tiny_config, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from burnish.models.kernels.expert_rows import GROUPED, UNSORTED, has_experts, unsorted_experts
from burnish.models.meta_init import build_on_meta

TOKENS, CHOSEN = 11, 2


class Operators(TorchDispatchMode):
    """Names of the operators that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **kwargs or {})


def experts_of(family: str) -> Any:
    """The first layer's experts of a tiny model."""
    return next(module for module in tiny_model(family).modules() if has_experts(module))


def computed(function: Any, experts: nn.Module, chosen: Tensor) -> tuple[list[Tensor], list[str]]:
    """Outputs and gradients, and what the backward pass ran."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 32, generator=generator).requires_grad_()
    weights = torch.rand(TOKENS, CHOSEN, generator=generator).requires_grad_()
    outputs = function(experts, hidden, chosen, weights)
    given = [hidden, weights, *experts.parameters()]
    with Operators() as ran:
        gradients = torch.autograd.grad(outputs, given, outputs.detach().cos())
    return [outputs.detach(), *gradients], ran.names


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_results_are_those_of_transformers_and_nothing_is_sorted(family: str) -> None:
    """Of experts with gates, and of transposed ones with biases. No token goes to the last expert."""
    experts = experts_of(family)
    scores = torch.rand(TOKENS, experts.num_experts - 1, generator=torch.Generator().manual_seed(1))
    chosen = scores.topk(CHOSEN).indices
    wanted, theirs = computed(ALL_EXPERTS_FUNCTIONS[GROUPED], experts, chosen)
    found, ours = computed(unsorted_experts, experts, chosen)
    for number, (mine, tensor) in enumerate(zip(found, wanted, strict=True)):
        assert_relative(mine, tensor, 1e-6, f"{family} {number}")
    assert any("index_put" in name for name in theirs)
    by_rows = [name for name in ours if "index_put" in name or "sort" in name]
    assert len(by_rows) == (2 if family == "gpt_oss" else 0)  # for each bias


def test_models_use_it() -> None:
    assert build_on_meta(tiny_config("mixtral")).config._experts_implementation == UNSORTED
    assert not any(map(has_experts, build_on_meta(tiny_config("qwen3")).modules()))
