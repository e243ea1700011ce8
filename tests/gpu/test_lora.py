"""An adapter on one device: PEFT's numbers, the merged model for the generator, the model without it as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapters_for_tests import LORA, RandomAdapter, plain_adapted
from contracts.engine import BETAS, CLIP, cut, make_examples, train, train_by_hand
from devices import DEVICES
from tiny import VOCAB, save_tiny, tiny_config

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.engines.base import Part
from burnish.engines.torch_engine import TorchEngine
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout
from burnish.parallel.processes import process_group


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


@pytest.fixture
def alone(device: torch.device) -> Iterator[Layout]:
    with process_group(device, 60.0) as layout:
        yield layout


def make_engine(layout: Layout, device: torch.device, path: Path, precision: str) -> TorchEngine:
    config = EngineConfig(precision=precision, max_grad_norm=CLIP, logprob_chunk=5)
    optim = OptimConfig(betas=BETAS, weight_decay=0.1)
    engine = TorchEngine(
        tiny_config("qwen3"), config, optim, layout=layout, device=device, lora=LORA
    )
    engine.load(SafetensorsSource(path), Part.FROZEN)
    engine.load(RandomAdapter(), Part.WEIGHTS)
    return engine


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_it_trains_as_peft_does(
    tmp_path: Path, alone: Layout, device: torch.device, precision: str, tolerance: float
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    wanted = train_by_hand(plain_adapted(path), make_examples(VOCAB))
    found = train(make_engine(alone, device, path, precision), make_examples(VOCAB), 2)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)


def test_merged_and_off(tmp_path: Path, alone: Layout, device: torch.device) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    engine = make_engine(alone, device, path, "fp32")
    merged = plain_adapted(path).merge_and_unload().state_dict()
    for shard in engine.published():
        assert torch.allclose(shard.part(shard.box).cpu(), merged[shard.spec.name], atol=1e-6)
    batch = cut(make_examples(VOCAB), alone, 2)
    before = [each.logprobs for each in engine.forward(batch, adapter=False)]
    with engine.parked(Part.FROZEN), engine.parked(Part.WEIGHTS):
        pass
    after = [each.logprobs for each in engine.forward(batch, adapter=False)]
    assert all(map(torch.equal, before, after))
    assert not torch.equal(engine.forward(batch)[0].logprobs, before[0])
