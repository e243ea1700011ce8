"""Runs whose moments are bytes, through the real command."""

from __future__ import annotations

import torch
from training_files import burnish, done, metrics, outcome, weights

BYTES = ["sft", "sft.yaml", "optim.kind=adamw8bit"]


def test_interrupted_equals_uninterrupted_and_it_goes_on_elsewhere(work):
    peace = done(work, *BYTES, "name=bytes_peace")
    losses = [row["val/loss"] for row in metrics(peace) if "val/loss" in row]
    assert losses[-1] < losses[0]
    done(work, *BYTES, "name=bytes_war", "steps=3")
    assert outcome(done(work, *BYTES, "name=bytes_war")) == outcome(peace)
    done(work, *BYTES, "name=bytes_grown", "steps=5")
    grown = weights(done(work, *BYTES, "name=bytes_grown", world=2))
    alone = weights(peace)
    assert alone.keys() == grown.keys()
    codes = [name for name, tensor in alone.items() if tensor.dtype == torch.uint8]
    scales = [name for name in alone if "_scale.safetensors" in name]
    assert len(codes) == len(scales) > 0
    for name in codes:
        assert float((alone[name].int() - grown[name].int()).abs().float().mean()) < 1, name
    for name in scales:
        torch.testing.assert_close(grown[name], alone[name], rtol=0.1, atol=0, msg=name)
    code, output = burnish(work, *BYTES, "name=bytes_war", "optim.kind=adamw", "steps=7")
    assert (code, "a run that differs in optim.kind" in output) == (4, True), output
