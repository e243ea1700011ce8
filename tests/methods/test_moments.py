"""Runs whose moments rest in bf16, through the real command."""

from __future__ import annotations

import torch
from support.runs.training_files import burnish, done, metrics, outcome, weights

BF16 = ["sft", "sft.yaml", "optim.moments=bf16", "optim.betas=[0.9,0.95]"]


def test_interrupted_equals_uninterrupted(work):
    peace = done(work, *BF16, "name=bf16_peace")
    losses = [row["val/loss"] for row in metrics(peace) if "val/loss" in row]
    assert losses[-1] < losses[0]
    done(work, *BF16, "name=bf16_war", "steps=3")
    assert outcome(done(work, *BF16, "name=bf16_war")) == outcome(peace)
    moments = [tensor for name, tensor in weights(peace).items() if "exp_avg" in name]
    assert {tensor.dtype for tensor in moments} == {torch.bfloat16}
    code, output = burnish(work, *BF16, "name=bf16_war", "optim.moments=fp32", "steps=7")
    assert code == 4, output
    assert "optim.moments" in output
