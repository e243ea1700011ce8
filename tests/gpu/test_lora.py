"""An adapter on one device: PEFT's numbers, the merged model for the generator, the model without it as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters_for_tests import EXPERTS, LORA, plain_adapted
from contracts.engine import cut, make_examples, train, train_by_hand
from engines_for_tests import make_engine
from tiny import VOCAB, save_tiny

from burnish.config.schema import LoraConfig
from burnish.parallel.layout import Layout


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_it_trains_as_peft_does(
    tmp_path: Path, alone: Layout, device: torch.device, precision: str, tolerance: float
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    wanted = train_by_hand(plain_adapted(path), make_examples(VOCAB))
    found = train(
        make_engine(alone, path, lora=LORA, device=device, precision=precision),
        make_examples(VOCAB),
        2,
    )
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_experts_train_as_with_peft(
    tmp_path: Path,
    alone: Layout,
    device: torch.device,
    precision: str,
    tolerance: float,
    rank: int,
) -> None:
    """On CUDA bf16 takes torch's grouped kernels, which want rows of 16 bytes: a rank of 3 has none."""
    lora = LoraConfig(rank=rank, alpha=6.0, targets=["q_proj", *EXPERTS])
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, **sizes)
    wanted = train_by_hand(plain_adapted(path, lora), make_examples(VOCAB))
    engine = make_engine(alone, path, lora=lora, device=device, precision=precision)
    found = train(engine, make_examples(VOCAB), 2)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)


def test_merged_and_off(tmp_path: Path, alone: Layout, device: torch.device) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    engine = make_engine(alone, path, lora=LORA, device=device, precision="fp32")
    merged = plain_adapted(path).merge_and_unload().state_dict()
    for shard in engine.published():
        assert torch.allclose(shard.part(shard.box).cpu(), merged[shard.spec.name], atol=1e-6)
    batch = cut(make_examples(VOCAB), alone, 2)
    before = [each.logprobs for each in engine.forward(batch, adapter=False)]
    with engine.parked():
        pass
    after = [each.logprobs for each in engine.forward(batch, adapter=False)]
    assert all(map(torch.equal, before, after))
    assert not torch.equal(engine.forward(batch)[0].logprobs, before[0])
