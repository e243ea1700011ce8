"""Planned memory beside that of measured runs, and some of these measured again, in two ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.planning_cases import CASES
from bench.planning_imagined import share_of
from burnish.models.flops import ModelFlops

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.15
LIVE = (
    "sft qwen3 bf16, checkpointing full, 1024 tokens, 1 process",
    "sft qwen3 bf16, checkpointing none, 1024 tokens, 2 processes, num_hidden_layers=3, engine.kind=megatron, engine.tensor_parallel=2",
)
MORE_LIVE = (
    "sft qwen3 fp32, checkpointing none, 256 tokens, 2 processes, 3 micro-batches",
    "sft qwen3 fp32, checkpointing full, 1024 tokens, 4 processes, num_hidden_layers=3, engine.sequence_parallel=2, engine.tensor_parallel=2",
)
TRACKED = (
    "sft qwen3_moe bf16, checkpointing selective, 512 tokens, 2 processes",
    "sft llama fp32, checkpointing selective, 1024 tokens, 2 processes, num_hidden_layers=3, engine.sequence_parallel=2",
)
MORE_TRACKED = (
    "sft llama fp32, checkpointing none, 1024 tokens, 1 process",
    "sft gemma3_text fp32, checkpointing none, 1024 tokens, 2 processes, num_hidden_layers=3, engine.tensor_parallel=2",
)
OF_FULL_SIZE = (
    "sft qwen3 bf16, checkpointing full, 8192 tokens, 4 processes, as Qwen3-8B on an accelerator, num_hidden_layers=3, vocab_size=32768, engine.tensor_parallel=4",
)
MORE_OF_FULL_SIZE = (
    "sft qwen3_moe bf16, checkpointing full, 8192 tokens, 64 processes, as Qwen3-30B-A3B on an accelerator, num_hidden_layers=3, vocab_size=32768",
    "sft qwen3_moe bf16, checkpointing none, 2048 tokens, 64 processes, as Qwen3-30B-A3B on an accelerator, num_hidden_layers=3, vocab_size=151936",
)


def measured_table():
    return json.loads(Path(__file__).with_name("measured.json").read_text())


@pytest.mark.parametrize("row", measured_table(), ids=lambda row: f"{row['phase']} {row['case']}")
def test_plans_are_near_measured_runs(row):
    planned = CASES[row["case"]].planned()[row["phase"]]
    assert planned == pytest.approx(row["measured"], rel=TOLERANCE)


def test_a_share_of_a_case_is_the_micro_batches_that_it_names():
    flops = ModelFlops(1000.0, {None: 1})
    for case in (each for each in CASES.values() if each.size):
        batch = share_of(case, flops)
        assert len(batch.microbatches) == case.microbatches
        assert 0.99 * case.together < batch.total_tokens / case.microbatches <= case.together


def test_the_table_covers_what_it_should():
    text = "\n".join(row["case"] for row in measured_table())
    families = (" llama ", " qwen3 ", " gemma3_text ", " olmo2 ", " qwen3_moe ")
    settings = (
        "fp32",
        "bf16",
        "none",
        "full",
        "selective",
        "2 processes",
        "4 processes",
        "micro-batches",
        "vocab",
        "engine.sequence_parallel=2",
        "engine.tensor_parallel=2",
        "engine.replicas=2",
        "engine.reshard_after_forward=False",
        "engine.reduce_each_microbatch=False",
        "model.lora.rank=16",
        "model.lora.publish=adapter",
        "algorithm.advantage=gae",
        "optim.kind=muon",
        "optim.moments=bf16",
        "engine.activation_offload=True",
        "engine.optimizer_offload=True",
        "engine.offload_during_rollout=True",
        "checkpoint.background=True",
        "engine.kind=megatron, engine.tensor_parallel=2",
        "engine.kind=megatron, engine.pipeline_parallel=2",
        "engine.virtual_stages=2",
        "engine.expert_parallel=2",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "engine.kind=megatron, model.lora.rank=16",
        "Qwen3-0.6B on an accelerator",
        "Qwen3-8B on an accelerator",
        "Qwen3-30B-A3B on an accelerator",
    )
    assert [each for each in (*families, *settings) if each not in text] == []
    adapters = [row["case"] for row in measured_table() if "model.lora.rank" in row["case"]]
    for beside in ("gemma3_text", "olmo2", "engine.tensor_parallel", "on an accelerator"):
        assert any(beside in case for case in adapters), beside
    phases = {"rollout", "log-probs", "update", "publish", "save"}
    assert {row["phase"] for row in measured_table()} == phases
    for processes in ("2 processes", "4 processes"):
        several = [
            row
            for row in measured_table()
            if row["case"].startswith("rl") and processes in row["case"]
        ]
        assert {row["phase"] for row in several} == phases


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cases", "how"),
    [
        (LIVE, []),
        (TRACKED, ["--tracked"]),
        pytest.param(MORE_LIVE, [], marks=pytest.mark.contract),
        pytest.param(MORE_TRACKED, ["--tracked"], marks=pytest.mark.contract),
        (OF_FULL_SIZE, []),
        pytest.param(MORE_OF_FULL_SIZE, [], marks=pytest.mark.contract),
    ],
)
def test_runs_measured_again(tmp_path, cases, how):
    """By what torch's allocator reports, and by torch's memory tracker."""
    file = tmp_path / "peaks"
    command = [sys.executable, "-m", "bench.planning", "--into", str(file), *how, "--cases", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = dict(map(json.loads, file.read_text().splitlines()))
    assert measured.keys() == set(cases)
    for case in cases:
        planned = CASES[case].planned()["update"]
        assert planned == pytest.approx(measured[case]["update"], rel=TOLERANCE), case
