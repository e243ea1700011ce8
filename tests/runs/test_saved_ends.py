"""Which tokens end the completions of what a run saves: tokenizer, config.json and generation_config.json agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.tiny import save_base
from support.models.tokenizers import char_tokenizer
from support.nightly import by_day
from support.runs.training_files import FRESH, RL, SFT, burnish, done, write_rows
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

LORA = {"lora": {"rank": 2, "targets": ["q_proj"]}}
END = char_tokenizer().convert_tokens_to_ids("<|im_end|>")
OLD = char_tokenizer().convert_tokens_to_ids("<eos>")


@pytest.fixture(scope="module")
def chats(work: Path) -> Path:
    """A base model that ends texts with another token than its template ends turns with, and conversations."""
    save_base(work / "texts", seed=0, eos_token_id=OLD)
    char_tokenizer(eos_token="<eos>", pad_token=None).save_pretrained(work / "texts")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    write_rows(work / "chats.jsonl", [{"messages": turns}] * 8)
    for name, model, settings in (
        ("plain", {"path": "texts"}, SFT),
        ("adapter", {"path": "texts", **LORA}, SFT),
        ("rl", {"path": "texts"}, RL),
        ("fresh", {"fresh": {**FRESH, "eos_token_id": OLD}, "tokenizer": "texts"}, SFT),
    ):
        data = settings["data"] if settings is RL else {"train": ["chats.jsonl"]}
        given = {**settings, "model": model, "data": data, "name": name, "steps": 1}
        given.pop("evaluation")
        (work / f"ends-{name}.yaml").write_text(json.dumps(given))
    return work


def ends(directory: Path) -> list[int]:
    """The ids that end completions, if all files agree."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    generation = GenerationConfig.from_pretrained(directory)
    found = generation.eos_token_id
    found = found if isinstance(found, list) else [found]
    assert found[0] == tokenizer.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    if (directory / "config.json").is_file():
        config = AutoConfig.from_pretrained(directory)
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    return found


@pytest.mark.parametrize("name", by_day(["plain", "fresh", "rl"], {"plain"}))
def test_a_saved_model_ends_where_its_template_ends_turns(chats: Path, name: str) -> None:
    run = done(chats, "rl" if name == "rl" else "sft", f"ends-{name}.yaml")
    directory = chats / "runs" / name
    assert run.parent == directory.parent
    assert ends(directory / "checkpoints/step-00000001/model") == [END, OLD]


def test_an_adapter_and_its_merged_model_do_so_too(chats: Path) -> None:
    done(chats, "sft", "ends-adapter.yaml")
    step = chats / "runs/adapter/checkpoints/step-00000001"
    assert ends(step / "model") == [END, OLD]
    assert burnish(chats, "ckpt", "export", str(step), "merged", "--merged")[0] == 0
    assert ends(chats / "merged") == [END, OLD]
    assert burnish(chats, "ckpt", "export", str(step), "alone")[0] == 0
    assert ends(chats / "alone") == [END, OLD]
