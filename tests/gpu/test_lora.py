"""An adapter on one device: PEFT's numbers, the merged model for the generator, the model without it as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.engine import cut, make_examples, train, train_by_hand
from support.models.adapters import EXPERTS, LORA, plain_adapted
from support.models.engines import make_engine
from support.models.generators import differences, make_generator
from support.models.tiny import VOCAB, save_tiny, tiny_config

from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout


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
    for shard in engine.published().changing:
        assert torch.allclose(shard.part(shard.box).cpu(), merged[shard.spec.name], atol=1e-6)
    batch = cut(make_examples(VOCAB), alone, 2)
    before = [each.logprobs for each in engine.forward(batch, adapter=False)]
    with engine.offloaded():
        pass
    after = [each.logprobs for each in engine.forward(batch, adapter=False)]
    assert all(map(torch.equal, before, after))
    assert not torch.equal(engine.forward(batch)[0].logprobs, before[0])


SIZES = {"hidden_size": 64, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "targets", "sizes"),
    [("qwen3", [], {}), ("qwen3_moe", ["q_proj", *EXPERTS], SIZES)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_generator_computes_with_it_beside_the_weights(
    tmp_path: Path,
    alone: Layout,
    device: torch.device,
    precision: str,
    family: str,
    targets: list[str],
    sizes: dict[str, Any],
) -> None:
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets, publish="adapter")
    path = save_tiny(tmp_path / "m", family, torch.float32, **sizes)
    engine = make_engine(alone, path, None, lora=lora, device=device, precision=precision)
    config = tiny_config(family, **sizes)
    generator = make_generator(config, alone, precision, lora, device)
    for version in range(2):
        generator.load_weights(engine.published(), version)
        found = np.abs(differences(engine, generator, config))
        assert found.mean() < (1e-5 if precision == "fp32" else 0.03)
    assert np.abs(differences(engine, generator, config, adapter=False)).mean() > 0.1
