"""Routers that are replayed and evened out on an accelerator, in the precision that is used there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contracts.engine import cut, loss, make_examples
from support.models.engines import make_engine
from support.models.tiny import MIXTURES, VOCAB, save_tiny
from support.ranks.devices import DEVICES

from burnish.distributed.processes import process_group


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", MIXTURES)
def test_replayed_in_bf16_the_same_experts_give_the_same_log_probs(
    tmp_path: Path, family: str, device: torch.device
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    settings = {"precision": "bf16", "activation_checkpointing": "full"}
    with process_group(device, 60) as layout:
        engine = make_engine(layout, path, device=device, router_aux_loss=0.1, **settings)
        batch = cut(make_examples(VOCAB), layout, 3)
        recorded = engine.forward(batch, experts=True)
        told = batch.with_experts(recorded)
        for ours, theirs in zip(engine.forward(told, experts=True), recorded, strict=True):
            assert ours.experts.device.type == device.type
            assert torch.equal(ours.experts, theirs.experts)
            assert torch.equal(ours.logprobs, theirs.logprobs)
        assert engine.forward_backward(told, loss).values_by_name()["moe/aux_loss"] > 0
        assert engine.optim_step(1e-2).values_by_name()["skipped"] == 0
        for ours, theirs in zip(engine.forward(told, experts=True), recorded, strict=True):
            assert torch.equal(ours.experts, theirs.experts)
