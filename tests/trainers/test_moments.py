"""Runs whose moments rest in bf16, through the real command: interrupted, and carried on by the other engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from training_files import burnish, done, metrics, outcome, weights

BF16 = ["sft", "sft.yaml", "optim.moments=bf16", "optim.betas=[0.9,0.95]"]


def losses(run: Path) -> list[float]:
    return [row["val/loss"] for row in metrics(run) if "val/loss" in row]


def test_interrupted_equals_uninterrupted_and_the_other_engine_goes_on(work):
    peace = done(work, *BF16, "name=bf16_peace")
    assert losses(peace)[-1] < losses(peace)[0]
    half = done(work, *BF16, "name=bf16_war", "steps=3")
    shutil.copytree(half, half.parent / "bf16_moved")
    assert outcome(done(work, *BF16, "name=bf16_war")) == outcome(peace)

    cut = ["engine.kind=megatron", "engine.tensor_parallel=2"]
    moved = done(work, *BF16, *cut, "name=bf16_moved", world=2)
    here, there = weights(peace), weights(moved)
    assert here.keys() == there.keys()
    moments = [name for name in here if "exp_avg" in name]
    assert {here[name].dtype for name in moments} == {torch.bfloat16}
    assert {there[name].dtype for name in moments} == {torch.bfloat16}
    # Where fp32 differs in its last bit, bf16 rounds a moment now and then to its neighbour, 2^-8 away.
    assert losses(moved)[-1] == pytest.approx(losses(peace)[-1], rel=1e-3)

    code, output = burnish(work, *BF16, "name=bf16_war", "optim.moments=fp32", "steps=7")
    assert code == 4, output
    assert "optim.moments" in output
