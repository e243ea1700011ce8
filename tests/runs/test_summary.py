"""A run begins with its parameters, rows and steps, which are those that it then finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.models.tiny import save_tiny, tiny_model

from burnish.config.load import read_config
from burnish.data.loader import Loader
from burnish.methods.table import METHODS
from burnish.runs.summary import summary

MODEL = "model.fresh={model_type: qwen3, vocab_size: 32, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}"


def rows_of(*overrides: str, command: str = "sft", brief: bool = True) -> dict[str, str]:
    """The summary's texts by their names."""
    config = read_config(None, list(overrides))
    lines = summary(
        config, METHODS["sft" if command == "sft" else "rl"], 1, brief=brief
    ).splitlines()
    return {name: text.strip() for name, _, text in (line[2:].partition("  ") for line in lines)}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seven.jsonl").write_text("\n".join(['{"prompt": "1"}'] * 7))
    pq.write_table(pa.table({"prompt": ["1"] * 5}), tmp_path / "five.parquet")
    (tmp_path / "array.json").write_text(json.dumps([{"prompt": "1"}], indent=1))
    return tmp_path


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gemma3_text", "unknown"])
def test_parameters_are_the_models(data: Path, kind: str) -> None:
    """By the table of families, and of other models by the headers of their weights."""
    family = "qwen3" if kind == "unknown" else kind
    model = tiny_model(family)
    save_tiny(data / kind, family)
    if kind == "unknown":
        config = json.loads((data / kind / "config.json").read_text())
        (data / kind / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    text = rows_of(f"model.path={kind}", "data.train=[seven.jsonl]")["model"]
    assert f" {sum(each.numel() for each in model.parameters()):,} parameters" in text


@pytest.mark.parametrize(
    ("paths", "count"), [(["seven.jsonl", "five.parquet"], 12), (["array.json"], None)]
)
def test_rows_are_counted(data: Path, paths: list[str], count: int | None) -> None:
    found = rows_of(MODEL, f"data.train=[{','.join(paths)}]")
    assert (f"{count} rows" in found["train on"]) == (count is not None)
    assert ("step" in found["length"]) == (count is not None)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("across", [False, True])
def test_steps_are_the_loaders(data: Path, epochs: int, across: bool) -> None:
    settings = [MODEL, "data.train=[seven.jsonl]", "reward.functions=numeric", "batch.prompts=4"]
    settings += [f"epochs={epochs}", f"algorithm.dynamic_sampling.enabled={across}".lower()]
    expected = Loader(7, 0, True, by_epoch=not across).takes(4, epochs)
    assert f", {expected} steps" in rows_of(*settings, command="rl")["length"]


def test_a_long_file_is_counted_in_part(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.runs.summary._COUNTING_SECONDS", 0.0)
    (data / "long.jsonl").write_text(f'{{"prompt": "{"1" * 50}"}}\n' * 40_000)
    (said,) = {rows_of(MODEL, "data.train=[long.jsonl]")["train on"]}
    assert "about " in said
    assert abs(int(said.split("about ")[1].split()[0]) - 40_000) < 400


def test_the_beginning_has_no_more_than_a_glance(data: Path) -> None:
    whole = rows_of(MODEL, "data.train=[seven.jsonl]", brief=False)
    brief = rows_of(MODEL, "data.train=[seven.jsonl]")
    assert brief.items() <= whole.items()
    assert list(brief) == ["model", "engine", "train on", "learning rate", "length", "writes"]


def test_it_is_said_before_torch_is_loaded() -> None:
    program = "import sys, burnish.cli.run; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["sft", "rl"])
@pytest.mark.parametrize("adapter", [[], ["model.lora.rank=4"]])
def test_a_default_learning_rate_is_said_to_be_one(
    data: Path, command: str, adapter: list[str]
) -> None:
    method = METHODS[command]
    settings = [MODEL, "data.train=[seven.jsonl]", *adapter]
    default = method.lora_lr if adapter else method.lr
    said = rows_of(*settings, command=command)["learning rate"]
    chosen = rows_of(*settings, "optim.lr=0.3", command=command)["learning rate"]
    assert f"{default:g} " in said
    assert method.title in said
    assert "0.3" in chosen
    assert method.title not in chosen
