"""Which examples are too long, what says so, and those that are longer than the model's positions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs.training_files import FRESH, burnish, make_files, write_rows
from transformers import AutoConfig

from burnish.config.schema import RunConfig
from burnish.runs.example_limits import example_limit
from burnish.runs.setup import prompt_limits

OPT = {"ffn_dim": 32, "word_embed_proj_dim": 32}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPTJ = {**GPT2, "rotary_dim": 4}


@pytest.mark.parametrize(
    ("most", "tokens", "sharing", "limit", "name"),
    [
        (None, 8192, 1, 8192, "batch.tokens_per_device"),
        (9, 8192, 1, 9, "data.max_length"),
        (9, 8192, 2, 9, "data.max_length"),
        (5000, 8192, 2, 4096, "batch.tokens_per_device, which two answers share"),
        (None, "auto:65536", 1, 8192, "data.max_length"),
        (None, "auto:65536", 2, 4096, "data.max_length"),
        (20000, "auto:65536", 1, 20000, "data.max_length"),
        (5000, "auto:65536", 2, 5000, "data.max_length"),
    ],
)
def test_what_limits_examples_is_named(
    most: int | None, tokens: int | str, sharing: int, limit: int, name: str
) -> None:
    limits = config_of(most, tokens).example_limits(sharing)
    assert example_limit(limits, AutoConfig.for_model(**FRESH)) == (limit, name)


def config_of(most: int | None, tokens: int | str) -> RunConfig:
    values = {"data": {"max_length": most}, "batch": {"tokens_per_device": tokens}}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("response", "tokens", "limits"),
    [
        (256, 8192, {"batch.tokens_per_device - rollout.max_response_length": 7936}),
        (256, "auto:65536", {"data.max_prompt_length": 7936}),
        (8000, "auto:65536", {"data.max_prompt_length": 2048}),
        (20000, "auto", {"data.max_prompt_length": 2048}),
    ],
)
def test_prompts_leave_room_for_completions_on_any_device(
    response: int, tokens: int | str, limits: dict[str, int]
) -> None:
    values = {
        "rollout": {"max_response_length": response},
        "batch": {"tokens_per_device": tokens},
    }
    hf_config = AutoConfig.for_model("llama", max_position_embeddings=1 << 20)
    foundation: Any = SimpleNamespace(config=RunConfig.model_validate(values), hf_config=hf_config)
    found = prompt_limits(foundation)
    assert {name: n for name, n in found.items() if "position" not in name} == limits


@pytest.mark.parametrize(
    ("kind", "settings"), [("gpt2", GPT2), ("opt", OPT), ("gptj", GPTJ), ("nemotron_h", {})]
)
def test_a_table_of_positions_limits_examples(kind: str, settings: dict[str, int]) -> None:
    """Mamba and attention without positions, as Nemotron-H's, have no such table."""
    sizes = {key: value for key, value in FRESH.items() if key in ("vocab_size", "hidden_size")}
    common = {**sizes, "num_attention_heads": 4, "max_position_embeddings": 64}
    hf_config = AutoConfig.for_model(kind, **{**common, **settings})
    limit, name = example_limit(config_of(None, 8192).example_limits(), hf_config)
    assert (limit == 64) == (kind != "nemotron_h")
    assert ("positions" in name or "max_position" in name) == (limit == 64)


@pytest.mark.parametrize(
    "model", [{"model_type": "gpt2", "vocab_size": 100, **GPT2}, FRESH], ids=["table", "rotary"]
)
def test_rows_beyond_the_model_s_positions_are_named(tmp_path: Path, model: dict[str, Any]) -> None:
    make_files(tmp_path)
    write_rows(tmp_path / "long.jsonl", [{"text": "a" * 70}, {"text": "ab"}])
    argv = ["data.train=long.jsonl", "batch.tokens_per_device=128", "steps=1"]
    argv += ["data.validation=[]", "evaluation.every=0", f"model.fresh={json.dumps(model)}"]
    code, output = burnish(tmp_path, "sft", "sft.yaml", *argv)
    assert code == 0, output
    assert ("dropped 1 of 2 rows" in output) == (model is not FRESH)
    assert ("1 rows of data.train" in output) == (model is FRESH)
