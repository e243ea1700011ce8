"""What the engine refuses to cut is what the planner does not plan: two lists of the same facts, one of them without torch."""

from __future__ import annotations

import contextlib
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config

from burnish.config.schema import EngineConfig
from burnish.engines.torch.compatibility import require_fitting
from burnish.errors import UsageError
from burnish.plan.layouts import divides
from burnish.plan.shape import PlannedModel

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=60, deadline=None)
@given(sequence=SIZES, tensor=SIZES, key_heads=SIZES, group=st.integers(1, 4))
def test_heads_are_planned_to_be_shared_where_they_can_be(
    sequence: int, tensor: int, key_heads: int, group: int
) -> None:
    heads = {"num_attention_heads": key_heads * group, "num_key_value_heads": key_heads}
    config = tiny_config("llama", hidden_size=32 * key_heads * group, **heads)
    [(layer, _)] = PlannedModel.of(config.to_dict()).layers
    fits = False
    with contextlib.suppress(UsageError):
        require_fitting(config, EngineConfig(sequence_parallel=sequence, tensor_parallel=tensor))
        fits = True
    assert fits == divides(sequence, tensor, layer)


@pytest.mark.parametrize(
    ("width", "tensor", "precision", "fits"),
    [(24, 1, "bf16", True), (24, 2, "bf16", False), (24, 2, "fp32", True), (25, 1, "fp32", False)],
)
def test_experts_of_widths_that_grouped_products_do_not_take_are_refused(
    width: int, tensor: int, precision: Literal["bf16", "fp32"], fits: bool
) -> None:
    config = tiny_config("qwen3_moe", moe_intermediate_size=width)
    settings = EngineConfig(tensor_parallel=tensor, precision=precision)
    refused = pytest.raises(UsageError, match=f"(?s){width} columns of an expert")
    with contextlib.nullcontext() if fits else refused:
        require_fitting(config, settings)
