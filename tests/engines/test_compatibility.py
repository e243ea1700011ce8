"""Settings that cannot divide a model are refused before it is built."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny import tiny_config
from support.nightly import draws
from transformers import AutoConfig

from burnish.config.schema import EngineConfig
from burnish.engines.factory import require_fitting
from burnish.engines.torch.tensor_parallel import share_matrices
from burnish.errors import IncompatibleError, UsageError
from burnish.models.meta_init import build_on_meta
from burnish.models.scorer import Scorer

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@draws(60, deadline=None)
@given(sequence=SIZES, tensor=SIZES, key_heads=SIZES, group=st.integers(1, 4))
def test_every_rank_has_as_many_heads(
    sequence: int, tensor: int, key_heads: int, group: int
) -> None:
    heads = {"num_attention_heads": key_heads * group, "num_key_value_heads": key_heads}
    config = tiny_config("llama", hidden_size=32 * key_heads * group, **heads)
    fits = False
    with contextlib.suppress(UsageError):
        require_fitting(config, EngineConfig(sequence_parallel=sequence, tensor_parallel=tensor))
        fits = True
    whole = key_heads % tensor == 0 and key_heads * group % (tensor * sequence) == 0
    assert fits == whole


@pytest.mark.parametrize(
    ("width", "tensor", "precision", "fits"),
    [(24, 1, "bf16", True), (24, 2, "bf16", False), (24, 2, "fp32", True), (25, 1, "fp32", False)],
)
def test_experts_of_widths_that_grouped_products_do_not_take_are_refused(
    width: int, tensor: int, precision: Literal["bf16", "fp32"], fits: bool
) -> None:
    config = tiny_config("qwen3_moe", moe_intermediate_size=width)
    settings = EngineConfig(tensor_parallel=tensor, precision=precision)
    refused = pytest.raises(UsageError, match=r"engine\.tensor_parallel")
    with contextlib.nullcontext() if fits else refused:
        require_fitting(config, settings)


def test_models_without_attention_heads_are_not_a_matter_of_divisibility() -> None:
    """Building the model refuses it, with the reason."""
    config = AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2)
    require_fitting(config, EngineConfig())


@pytest.mark.parametrize(("widths", "fits"), [([48, 32], True), ([48, 36], False)])
def test_experts_may_have_a_width_for_each_layer(widths: list[int], fits: bool) -> None:
    config = AutoConfig.for_model(
        "hunyuan_v1_moe",
        num_hidden_layers=2,
        hidden_size=64,
        num_experts=4,
        moe_topk=[2, 2],
        moe_intermediate_size=widths,
    )
    with contextlib.nullcontext() if fits else pytest.raises(UsageError):
        require_fitting(config, EngineConfig(precision="bf16"))


def test_norms_with_a_row_for_each_head_are_not_cut() -> None:
    config = AutoConfig.for_model(
        "cohere", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, use_qk_norm=True,
    )  # fmt: skip
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(IncompatibleError, match="norm"):
        share_matrices(Scorer(build_on_meta(config)), group)
