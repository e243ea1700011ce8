"""Families: what Megatron says of a model is what transformers says, and what it would say wrongly is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import assert_relative, cut, make_examples, score_by_hand
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from burnish.config.schema import EngineConfig, MegatronConfig
from burnish.distributed.layout import Layout
from burnish.engines.factory import require_fitting
from burnish.engines.megatron.model import pipeline_layout
from burnish.engines.megatron.modules import layer_modules
from burnish.errors import UsageError
from burnish.models.value_head import value_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOWS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "dynamic": ("llama", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}),
    "yarn": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", WINDOWS),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe renormalized": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
}


TEMPERATURES = (1.0, 0.7)


def said_rank(layout: Layout, paths: Sequence[Path]) -> list[list[Tensor]]:
    """By model and temperature the log-probs of all examples."""
    found = []
    for path in paths:
        engine = make_engine(layout, path, None, kind="megatron")
        batches = [cut(make_examples(VOCAB), engine.layout, 6, each) for each in TEMPERATURES]
        found.append([engine.forward(batch)[0].logprobs for batch in batches])
        engine.close()
    return found


def test_every_family_says_what_transformers_says_at_any_temperature(tmp_path: Path) -> None:
    paths = [
        save_tiny(tmp_path / name, family, torch.float32, **changes)
        for name, (family, changes) in MODELS.items()
    ]
    found = run_ranks(said_rank, 1, paths)[0]
    for name, path, said in zip(MODELS, paths, found, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for temperature, logprobs in zip(TEMPERATURES, said, strict=True):
            wanted = scored(model, temperature)
            assert_relative(logprobs, wanted, 1e-5, f"{name} at {temperature}")


@torch.no_grad()
def scored(model: PreTrainedModel, temperature: float) -> Tensor:
    """The log-probs of all examples, of logits that are divided."""
    divided = model.lm_head.register_forward_hook(lambda *called: called[-1] / temperature)
    found = [score_by_hand(model, example)[0] for example in make_examples(VOCAB)]
    divided.remove()
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("nemotron_h", {}, "Mamba"),
        ("falcon_h1", {}, "Mamba"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mimo_v2_flash", {}, "mimo_v2_flash"),
        ("qwen3", {"hidden_act": "gelu"}, "gelu"),
        ("olmoe", {"clip_qkv": 1.0}, "clip_qkv"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    family: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        require_fitting(tiny_config(family, **changes), EngineConfig(kind="megatron"))
    assert "engine.kind=torch" in str(caught.value)


def test_a_family_whose_layers_look_like_those_of_another_is_refused() -> None:
    apertus = AutoConfig.for_model("apertus", num_hidden_layers=1)
    with pytest.raises(UsageError):
        require_fitting(apertus, EngineConfig(kind="megatron"))


def test_other_heads_than_of_a_vocabulary_or_a_value_are_refused() -> None:
    several, other = value_config(tiny_config("qwen3")), tiny_config("qwen3")
    several.num_labels = 3
    other.architectures = ["Qwen3ForQuestionAnswering"]
    for shape, said in ((several, "a head with 3 values"), (other, "a head that is neither")):
        with pytest.raises(UsageError, match=said):
            require_fitting(shape, EngineConfig(kind="megatron"))


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("qwen3", {"tensor_parallel": 3}, "engine.tensor_parallel: 3, 4 "),
        (
            "qwen3",
            {"tensor_parallel": 2, "sequence_parallel": 4},
            "engine.sequence_parallel: 4, 2 ",
        ),
        ("qwen3", {"pipeline_parallel": 2, "virtual_stages": 2}, "2 layers"),
        ("qwen3", {"expert_parallel": 2}, "engine.expert_parallel: 2"),
        ("qwen3_moe", {"expert_parallel": 3}, "engine.expert_parallel: 3, 4 "),
        ("qwen3_moe", {"expert_tensor_parallel": 5}, "24 columns"),
        ("qwen2_moe", {"tensor_parallel": 2}, "39 columns"),
        (
            "qwen3",
            {
                "activation_checkpointing": "selective",
                "megatron": {"recompute_modules": ["mla_up_proj"]},
            },
            "mla_up_proj",
        ),
        ("olmo2", {"tensor_parallel": 4}, "2 key heads"),
        ("qwen3_5_text", {"tensor_parallel": 4}, "linear_num_key_heads: 2"),
        (
            "qwen3_moe",
            {"tensor_parallel": 2, "megatron_sequence_parallel": False},
            "megatron_sequence_parallel: false",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_model_are_refused(
    family: str, settings: dict[str, Any], said: str
) -> None:
    shared = {"shared_expert_intermediate_size": 39} if family == "qwen2_moe" else {}
    with pytest.raises(UsageError, match=said):
        require_fitting(tiny_config(family, **shared), EngineConfig(kind="megatron", **settings))


@pytest.mark.parametrize(("heads", "key_heads", "tensor"), [(12, 4, 6), (6, 3, 2)])
def test_key_heads_that_neither_divide_the_tensor_ranks_nor_are_divided_are_refused(
    heads: int, key_heads: int, tensor: int
) -> None:
    shape = tiny_config("qwen3", num_attention_heads=heads, num_key_value_heads=key_heads)
    said = f"engine.tensor_parallel: {tensor}, {key_heads} key heads"
    with pytest.raises(UsageError, match=said) as caught:
        require_fitting(shape, EngineConfig(kind="megatron", tensor_parallel=tensor))
    assert "engine.tensor_parallel" in str(caught.value)
    assert f" {key_heads}" in str(caught.value)


def test_heads_that_no_rank_can_have_a_part_of_are_refused() -> None:
    shape = tiny_config("qwen3", num_attention_heads=8, num_key_value_heads=1, head_dim=6)
    with pytest.raises(UsageError, match="60"):
        require_fitting(shape, EngineConfig(kind="megatron", tensor_parallel=8))


def test_more_tensor_ranks_than_the_vocabulary_has_rows_for_are_refused() -> None:
    changes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 5}
    with pytest.raises(UsageError, match=r"(?s)engine\.tensor_parallel.*4.*5"):
        require_fitting(
            tiny_config("llama", **changes), EngineConfig(kind="megatron", tensor_parallel=4)
        )


def two_stages(**megatron: Any) -> EngineConfig:
    return EngineConfig(kind="megatron", pipeline_parallel=2, megatron=MegatronConfig(**megatron))


def test_layers_are_dealt_out_as_told() -> None:
    config = two_stages(pipeline_model_parallel_layout="Et,(t|)*1t*2L")
    layout = [["embedding", "decoder", "decoder"], ["decoder", "decoder", "loss"]]
    assert pipeline_layout(4, config) == layout


@pytest.mark.parametrize("told", ["Ett|ttL", "E|t|ttL", "Ett|tL|", "t|Ettl", "Et|t", "text", ""])
def test_other_divisions_of_layers_are_refused(told: str) -> None:
    with pytest.raises(UsageError, match="pipeline_model_parallel_layout"):
        require_fitting(
            tiny_config("qwen3", num_hidden_layers=3),
            two_stages(pipeline_model_parallel_layout=told),
        )


def test_a_dispatcher_that_is_not_installed_is_refused() -> None:
    with pytest.raises(UsageError, match="deep_ep"):
        require_fitting(tiny_config("qwen3_moe"), two_stages(moe_token_dispatcher_type="flex"))


def test_fused_permutation_is_refused_without_its_kernels() -> None:
    with pytest.raises(UsageError, match="moe_permute_fusion"):
        layer_modules(two_stages(moe_permute_fusion=True), torch.device("cpu"))


@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (5, 4), (7, 2), (28, 8)])
def test_layers_are_dealt_out_evenly_in_order(layers: int, stages: int) -> None:
    config = EngineConfig(kind="megatron", pipeline_parallel=stages // 2, virtual_stages=2)
    layout = pipeline_layout(layers, config)
    assert layout is not None
    assert [kind for stage in layout for kind in stage] == [
        "embedding",
        *["decoder"] * layers,
        "loss",
    ]
    counts = [stage.count("decoder") for stage in layout]
    assert len(counts) == stages
    assert sorted(counts, reverse=True) == counts
    assert counts[0] - counts[-1] <= 1
