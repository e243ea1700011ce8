"""Adapters on a base in 4 bits (QLoRA), against runs on weights that transformers has rounded so, and killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from support.models.tiny import save_base
from support.runs.preferences import begin_pairs, near
from support.runs.same_runs import assert_same
from support.runs.training_files import At, done, metrics, outcome, ranks, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

ADAPTER = ["model.lora.rank=4", "checkpoint.save_every=1"]
NF4 = "model.lora.quantize_base=nf4"
ROWS = {
    "sft": ["data.train=[train.jsonl]", "batch.tokens_per_device=64", "method={}"],
    "dpo": ["data.validation=[pairs.jsonl]"],
    "rm": ["data.validation=[pairs.jsonl]", "method={center: 0.1}"],
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("nf4")
    base = work / "base"
    save_base(base, seed=0, hidden_size=64, intermediate_size=128)
    begin_pairs(work, "run.yaml", model={"path": str(base)})
    in_nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    rounded = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=in_nf4
    )
    rounded.dequantize().save_pretrained(work / "rounded")
    AutoTokenizer.from_pretrained(base).save_pretrained(work / "rounded")
    return work


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ROWS)
def test_it_trains_as_on_rounded_weights_and_goes_on_after_a_kill(work: Path, kind: str) -> None:
    argv = [kind, "run.yaml", *ADAPTER, *ROWS[kind]]
    run = done(work, *argv, NF4, f"name={kind}")
    rounded = done(work, *argv, "model.path=rounded", f"name={kind}-rounded")
    for mine, theirs in zip(metrics(run), metrics(rounded), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    near(weights(run), weights(rounded), 1e-5)
    assert_same(done(work, *argv, NF4, f"name={kind}-shared", world=2), run)
    at = At("burnish.methods.parts.offline_training:make_batch", 4, signal.SIGKILL)
    (command,) = ranks(work, [*argv, NF4, f"name={kind}-killed"], 1, at=at)
    assert command.wait() != 0
    assert outcome(done(work, *argv, NF4, f"name={kind}-killed")) == outcome(run)
