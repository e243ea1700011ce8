from __future__ import annotations

from typing import Any

import pytest
from support.models.tiny import tiny_config
from transformers import AutoConfig

from burnish.check.small_model import shrink_model
from burnish.config.schema import EngineConfig
from burnish.engines.factory import require_fitting
from burnish.families import layers_with_experts


def test_a_shrunken_model_keeps_its_kind() -> None:
    config = tiny_config(
        "gemma3_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=1024,
    )
    small = shrink_model(config, EngineConfig(), 64)
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 6)
    assert small.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert (small.num_attention_heads, small.num_key_value_heads) == (12, 3)
    assert (small.hidden_size, small.head_dim, small.sliding_window) == (96, 24, 16)
    assert small.tie_word_embeddings
    assert small.vocab_size == 64


def test_a_shrunken_model_keeps_positions_that_number_the_hidden_size() -> None:
    config = tiny_config("llama", hidden_size=2048, max_position_embeddings=2048)
    small = shrink_model(config, EngineConfig(), 64)
    assert small.hidden_size < small.max_position_embeddings == 2048


def test_a_shrunken_model_has_few_heads_of_linear_attention() -> None:
    """Kimi's are in a mapping of their own, layers counted from 1."""
    own = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
    layers = {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    config = AutoConfig.for_model("kimi_linear", num_hidden_layers=4, linear_attn_config=own | layers)  # fmt: skip
    small = shrink_model(config, EngineConfig(), 64)
    assert max(small.linear_head_dim, small.linear_num_heads) <= 16
    assert small.layer_types == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"mlp_only_layers": [0, 1, 2], "num_hidden_layers": 6}, [3, 4, 5]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 3, "num_hidden_layers": 6}, [2, 4]),
        ({"mlp_only_layers": [], "num_hidden_layers": 6}, [0, 1, 2, 3]),
        ({"mlp_only_layers": [0, 1, 2]}, []),
    ],
    ids=str,
)
def test_a_shrunken_mixture_keeps_its_kinds_of_layers(
    fields: dict[str, Any], left: list[int]
) -> None:
    small = shrink_model(tiny_config("qwen3_moe", **fields), EngineConfig(), 64)
    assert layers_with_experts(vars(small)) == left


@pytest.mark.parametrize(
    ("tensor", "sequence", "heads", "key_heads"), [(1, 1, 12, 3), (4, 1, 16, 4), (2, 8, 16, 4)]
)
def test_a_shrunken_model_can_be_shared(
    tensor: int, sequence: int, heads: int, key_heads: int
) -> None:
    config = tiny_config("qwen3", num_attention_heads=32, num_key_value_heads=8)
    engine = EngineConfig(tensor_parallel=tensor, sequence_parallel=sequence)
    small = shrink_model(config, engine, 64)
    assert (small.num_attention_heads, small.num_key_value_heads) == (heads, key_heads)
    require_fitting(small, engine)


def test_a_shrunken_model_has_no_more_key_heads_than_the_whole_one() -> None:
    """Where tensor ranks share them, they do in the small one."""
    config = tiny_config("qwen3", num_attention_heads=16, num_key_value_heads=2)
    engine = EngineConfig(kind="megatron", tensor_parallel=4)
    small = shrink_model(config, engine, 64)
    assert (small.num_attention_heads, small.num_key_value_heads) == (16, 2)
    require_fitting(small, engine)


@pytest.mark.parametrize(
    ("family", "fields", "head_dim", "hidden"),
    [
        ("llama", {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}, 24, 6 * 16),
        ("llama", {"hidden_size": 64, "head_dim": 8, "num_attention_heads": 8}, 16, 6 * 8),
        ("qwen3", {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 32}, 24, 24 * 8),
        # Whose output layer wants heads as wide as hidden states.
        ("helium", {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}, 24, 6 * 24),
    ],
    ids=str,
)
def test_heads_are_not_as_wide_as_hidden_states_where_they_need_not_be(
    family: str, fields: dict[str, int], head_dim: int, hidden: int
) -> None:
    config = AutoConfig.for_model(family, num_key_value_heads=4, **fields)
    small = shrink_model(config, EngineConfig(), 64)
    assert (small.head_dim, small.hidden_size, small.num_key_value_heads) == (head_dim, hidden, 3)
