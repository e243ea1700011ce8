"""The Megatron engine on one device: the torch engine's numbers, in fp32 and in bf16, and nothing lost by parking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import BETAS, CLIP, assert_relative, make_examples, train
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from support.ranks.devices import DEVICES
from torch import Tensor
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.models.loading import SafetensorsSource

pytest.importorskip("megatron.core")
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.megatron.modules import transformer_engine

FAMILIES = ["llama", "qwen3", "qwen3_moe"]
pytestmark = pytest.mark.parametrize(
    "device", DEVICES[int(torch.cuda.is_available()) :], indirect=True
)
"""Megatron computes on CUDA wherever there is any."""


def megatron(
    layout: Layout, path: Path, device: torch.device, precision: str, **settings: Any
) -> MegatronEngine:
    config = EngineConfig(kind="megatron", precision=precision, max_grad_norm=CLIP, **settings)
    optim = OptimConfig(betas=BETAS, weight_decay=0.1)
    hf_config = AutoConfig.from_pretrained(path)
    engine = MegatronEngine(hf_config, config, optim, layout=layout, device=device)
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    return engine


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_the_torch_engine(
    tmp_path: Path,
    alone: Layout,
    device: torch.device,
    family: str,
    precision: str,
    tolerance: float,
    recomputed: str,
) -> None:
    path = save_tiny(tmp_path / family, family, torch.float32)
    wanted = train(
        make_engine(alone, path, device=device, precision=precision), make_examples(VOCAB), 2
    )
    engine = megatron(alone, path, device, precision, activation_checkpointing=recomputed)
    found = train(engine, make_examples(VOCAB), 2)
    for kind in ("losses", "norms"):
        assert found[kind] == pytest.approx(wanted[kind], rel=tolerance), kind
    for number, outputs in wanted["logprobs"].items():
        assert_relative(found["logprobs"][number][0], outputs[0], tolerance, f"example {number}")
    assert {shard.tensor.device for part in Part for shard in engine.shards(part)} == {device}
    engine.close()


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engines_layers_train_like_torchs(
    tmp_path: Path, alone: Layout, device: torch.device, family: str, recomputed: str
) -> None:
    """In bf16, both loaded and read by the checkpoint's names."""
    if device.type != "cuda" or transformer_engine.TEGroupedLinear is None:
        pytest.skip("needs CUDA and transformer_engine")
    path = save_tiny(tmp_path / family, family, torch.float32)
    found = {}
    for layers in ("torch", "transformer_engine"):
        settings = {"layers": layers, "activation_checkpointing": recomputed}
        engine = megatron(alone, path, device, "bf16", **settings)
        found[layers] = train(engine, make_examples(VOCAB), 2)
        found[layers]["names"] = {shard.spec for shard in engine.shards(Part.WEIGHTS)}
        engine.close()
    wanted, found = found["torch"], found["transformer_engine"]
    assert found["names"] == wanted["names"]
    for kind in ("losses", "norms"):
        assert found[kind] == pytest.approx(wanted[kind], rel=3e-2), kind
    for number, outputs in wanted["logprobs"].items():
        assert_relative(found["logprobs"][number][0], outputs[0], 3e-2, f"example {number}")


def test_parking_frees_the_device_and_changes_no_bit(
    tmp_path: Path, alone: Layout, device: torch.device
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    engine = megatron(alone, path, device, "bf16")
    before = copies(engine)
    held = sum(tensor.nbytes for tensor in before)
    there = allocated(device)
    with engine.offloaded():
        assert there - allocated(device) >= (held if device.type == "cuda" else 0)
    assert all(torch.equal(*pair) for pair in zip(before, copies(engine), strict=True))
    engine.close()


def copies(engine: MegatronEngine) -> list[Tensor]:
    shards = (shard for part in Part for shard in engine.shards(part))
    return [shard.tensor.detach().to("cpu", copy=True) for shard in shards]


def allocated(device: torch.device) -> int:
    """Bytes of tensors on an accelerator."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
