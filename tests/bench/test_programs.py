"""Benchmarks do not rot unseen: each program starts, and peers that need nothing but this environment take a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.peers import ENVIRONMENTS, Peer
from bench.preferences import write_pairs
from bench.words import model_config, write_prompts, write_tokenizer

ROOT = Path(__file__).parents[2]
SOURCES = {path.stem: path.read_text() for path in (ROOT / "bench").glob("*.py")}
PROGRAMS = sorted(name for name, text in SOURCES.items() if ".parse_args()" in text)
STARTED = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"bench.{name}", run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, name
    print("started", name)
"""


@pytest.mark.nightly
def test_every_program_starts_and_knows_its_options() -> None:
    assert {"gpu", "grpo", "sft", "learning", "checkpoint", "__main__"} <= set(PROGRAMS)
    command = [sys.executable, "-c", STARTED, *PROGRAMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("started")] == [
        f"started {name}" for name in PROGRAMS
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with texts and prompts."""
    directory = tmp_path_factory.mktemp("world")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 4096}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**model_config("5m") | sizes)).save_pretrained(directory / "model")
    write_tokenizer(directory / "model")
    texts = [{"text": "w2 w3 w4 w5 w6"}, {"text": "w7 w8"}] * 8
    (directory / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    write_prompts(directory / "prompts.jsonl", 16, 4)
    write_pairs(directory / "pairs.jsonl", 16, 4)
    return directory


def settings_of(name: str, world: Path) -> dict[str, object]:
    common: dict[str, object] = {"model": str(world / "model"), "lr": 1e-5, "rows": 2}
    common |= {"weights_dtype": "float32", "seed": 0, "checkpointing": False}
    texts = {"texts": str(world / "texts.jsonl"), "examples": 4, "packing": None}
    prompts = {"prompts": str(world / "prompts.jsonl"), "prompts_per_step": 2, "samples": 2}
    pairs = {
        "model": {"path": str(world / "model")},
        "data": {"train": [str(world / "pairs.jsonl")], "shuffle": False},
        "batch": {"examples": 4, "tokens_per_device": 512},
        "engine": {"precision": "fp32"},
        "optim": {"lr": 1e-5},
    }
    own: dict[str, dict[str, object]] = {
        "hf_sft": texts,
        "hf_step": {"length": 5, "passes": 2, "checkpointing": True},
        "preferences_own": {"config": pairs, "threads": 1},
        "trl_dpo": {"pairs": str(world / "pairs.jsonl"), "examples": 4, "precompute": True},
        "trl_sft": texts,
        "trl_grpo": prompts | {"max_tokens": 3, "clock": "wall"},
    }
    return common | own[name]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("hf_sft", 18),
        ("hf_step", 20),
        ("preferences_own", 4),
        pytest.param("trl_dpo", 4, marks=pytest.mark.contract),
        pytest.param("trl_sft", 18, marks=pytest.mark.contract),
        pytest.param("trl_grpo", 12, marks=pytest.mark.contract),
    ],
)
def test_peers_take_a_step(world: Path, name: str, tokens: int) -> None:
    environment = "trl" if name.startswith("trl") else None
    if environment and not (ENVIRONMENTS / environment / ".installed").exists():
        pytest.skip("needs the environment of TRL, which benchmarks make")
    with Peer(environment, f"bench.{name}", settings_of(name, world), 1) as peer:
        answer = peer.ask({"lengths": [3] * 4})
    assert answer["tokens"] == tokens
    assert answer["seconds"] > 0
