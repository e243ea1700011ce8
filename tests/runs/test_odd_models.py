"""A model directory or model.fresh that cannot be trained is refused in a sentence, before weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny import save_tiny
from support.models.tokenizers import CHATML, char_tokenizer, save_char_tokenizer

from burnish.config.schema import LoraConfig, ModelConfig, RunConfig
from burnish.errors import BurnishError, UsageError
from burnish.models.lora.adapter import Adapter
from burnish.models.meta_init import build_on_meta
from burnish.runs.setup import Foundation, lay_foundation

FRESH = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is in order."""
    directory = tmp_path_factory.mktemp("good")
    save_tiny(directory, "qwen3", vocab_size=len(char_tokenizer()))
    save_char_tokenizer(directory)
    return directory


def laid(model: dict[str, Any]) -> Foundation:
    return lay_foundation(
        RunConfig.model_validate(
            {
                "name": "odd",
                "steps": 1,
                "model": model,
                "data": {"train": ["train.jsonl"]},
                "reward": {"functions": [{"function": "exact_match"}]},
                "rollout": {"max_response_length": 4},
            }
        )
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "nope"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"hidden_size": "big"},
        {"rms_norm_eps": "a"},
        {"eos_token_id": "x"},
        {"dtype": "float7"},
        {"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}},
        {"num_hidden_layers": 1, "layer_types": ["full_attention"] * 2},
        {"layer_types": ["nope"] * 2},
        {"pad_token_id": 1000},
        {"architectures": 5},
        {"auto_map": 3},
        {"model_type": "clip"},
        {"model_type": "qwen2_5_vl"},
        {"model_type": "gemma3"},
        {"model_type": "gpt_oss"},
    ],
    ids=str,
)
def test_odd_values_of_a_configuration(good: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    shutil.copytree(good, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(BurnishError):
        laid({"path": str(tmp_path / "m")})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[1]"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("config.json", '{"a":' * 5000 + "1" + "}" * 5000),
        ("config.json", "[]"),
    ],
)
def test_broken_files(good: Path, tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(good, tmp_path / "m")
    (tmp_path / "m" / name).write_text(text)
    with pytest.raises(BurnishError, match=name):
        laid({"path": str(tmp_path / "m")})


def test_what_could_not_be_saved_is_refused_before_training(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").unlink()
    file = tmp_path / "m/tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"chat_template": CHATML + "{# \ud800 #}"})
    )
    model = ModelConfig(path=str(tmp_path / "m"))
    lay_foundation(RunConfig(model=model))
    with pytest.raises(UsageError):
        lay_foundation(RunConfig(model=model), given=model)


@pytest.mark.parametrize(
    "fresh",
    [
        {"model_type": "qwen3", "layer_types": ["full_attention"] * 3},
        {"model_type": "t5"},
        {"model_type": "nemotron"},
        {"model_type": "rwkv"},
    ],
    ids=str,
)
@pytest.mark.nightly
def test_new_models(good: Path, fresh: dict[str, Any]) -> None:
    with pytest.raises(BurnishError):
        laid({"fresh": FRESH | fresh, "tokenizer": str(good)})


def test_a_list_of_widths_of_experts(good: Path) -> None:
    experts = {"num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [64, 64]}
    fresh = FRESH | {"model_type": "hunyuan_v1_moe", "head_dim": 8} | experts
    assert laid({"fresh": fresh, "tokenizer": str(good)}).flops.per_token > 0


def test_adapters_of_experts_that_could_not_be_merged(good: Path) -> None:
    fresh = FRESH | {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2}
    config = laid({"fresh": fresh, "tokenizer": str(good)}).hf_config
    lora = LoraConfig(rank=4, targets=["q_proj", "experts.gate_up_proj"])
    with pytest.raises(BurnishError, match="gate_up_proj"):
        Adapter(build_on_meta(config), lora)
