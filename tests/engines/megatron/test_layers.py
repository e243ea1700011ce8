"""Whose modules layers are built of, and what is said where those that are asked for cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from burnish.config.schema import EngineConfig
from burnish.engines.megatron import modules
from burnish.engines.megatron.modules import GroupedExperts, layer_modules
from burnish.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def engine(asked: str, precision: str = "bf16") -> EngineConfig:
    return EngineConfig(kind="megatron", layers=asked, precision=precision)


@pytest.fixture(autouse=True)
def neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed on this machine."""
    absent = SimpleNamespace(TEGroupedLinear=None, fused_permute_with_probs=None)
    monkeypatch.setattr(modules, "transformer_engine", absent)
    monkeypatch.setattr(modules.linear, "_grad_accum_fusion_available", False)


@pytest.fixture
def transformer_engine(neither: None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A TransformerEngine, of which Megatron's classes have but their names."""
    names = ("TELayerNormColumnParallelLinear", "TERowParallelLinear", "TENorm", "TEGroupedLinear")
    names += ("TEColumnParallelLinear", "TEColumnParallelGroupedLinear")
    names += ("TERowParallelGroupedLinear", "fused_permute_with_probs")
    found = SimpleNamespace(**{name: type(name, (), {}) for name in names})
    monkeypatch.setattr(modules, "transformer_engine", found)
    return found


@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_where_there_is_none_they_are_of_torch(asked: str) -> None:
    for device in (CPU, CUDA):
        assert layer_modules(engine(asked), device).experts.module is GroupedExperts


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_not_installed_is_refused_with_the_command(device: torch.device) -> None:
    with pytest.raises(UsageError, match=f"device {device}") as caught:
        layer_modules(engine("transformer_engine"), device)
    assert "pip install" in str(caught.value)
    assert "engine.layers=torch" in str(caught.value)


def test_where_there_is_one_it_is_used_on_cuda_in_bf16(transformer_engine: SimpleNamespace) -> None:
    for asked in ("auto", "transformer_engine"):
        chosen = layer_modules(engine(asked), CUDA)
        assert chosen.column is transformer_engine.TELayerNormColumnParallelLinear
        assert chosen.experts.submodules.linear_fc2 is transformer_engine.TERowParallelGroupedLinear
    for config, device in (
        (engine("torch"), CUDA),
        (engine("auto", "fp32"), CUDA),
        (engine("auto"), CPU),
    ):
        assert layer_modules(config, device).experts.module is GroupedExperts


@pytest.mark.parametrize("asked", ["auto", "transformer_engine", "torch"])
def test_gradients_are_added_by_apex_where_it_is_installed(
    transformer_engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    assert not layer_modules(engine(asked), CUDA).adds_gradients
    monkeypatch.setattr(modules.linear, "_grad_accum_fusion_available", True)
    assert layer_modules(engine(asked), CUDA).adds_gradients == (asked != "torch")
    assert not layer_modules(engine("auto", "fp32"), CUDA).adds_gradients
    assert not layer_modules(engine("auto"), CPU).adds_gradients


def test_it_is_refused_where_there_is_no_cuda(transformer_engine: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="transformer_engine"):
        layer_modules(engine("transformer_engine"), CPU)
