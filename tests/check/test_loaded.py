"""What a run has loaded, beside what plain transformers loads from the same directory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny import FAMILIES, WITH_STATE, save_classifier, save_tiny
from support.nightly import by_day
from support.ranks.processes import RankFailed, run_ranks

from burnish.boxes.shards import Shard, ShardSource
from burnish.check import loaded
from burnish.check.loaded import prove_loaded
from burnish.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Part
from burnish.engines.factory import make_engine
from burnish.errors import IncompatibleError
from burnish.models.loading import read_model_config, weights_source
from burnish.models.lora.adapter import FreshAdapter
from burnish.models.meta_init import count_flops


@pytest.fixture(scope="module")
def alone() -> Iterator[Layout]:
    with process_group(torch.device("cpu"), 60.0) as layout:
        yield layout


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Damaged:
    """A source that reads one tensor wrongly."""

    def __init__(self, source: ShardSource, name: str, factor: float) -> None:
        self._source, self._name, self._factor = source, name, factor

    def fill(self, shards: Iterable[Shard]) -> None:
        shards = list(shards)
        self._source.fill(shards)
        for shard in shards:
            if shard.spec.name == self._name:
                shard.tensor.mul_(self._factor)


def prove(
    layout: Layout,
    directory: Path,
    damage: tuple[str, float] | None = None,
    precision: str = "fp32",
    lora: LoraConfig | None = None,
    **parallel: int,
) -> None:
    """Load and compare, as a run does."""
    model = ModelConfig(path=str(directory))
    hf_config = read_model_config(model)
    settings = EngineConfig(precision=precision, **parallel)
    device = torch.device("cpu")
    engine = make_engine(
        hf_config, settings, OptimConfig(), layout=layout, device=device, lora=lora
    )
    source: ShardSource = weights_source(model, hf_config, 0)
    if damage is not None:
        source = Damaged(source, *damage)
    part = Part.FROZEN if lora else Part.WEIGHTS
    engine.load(source, part)
    if lora:
        engine.load(FreshAdapter(0), Part.WEIGHTS)
    flops = count_flops(hf_config)
    prove_loaded(engine, hf_config, directory, flops, DTYPES[precision], part)
    engine.close()


@pytest.mark.parametrize(
    "family", by_day([*FAMILIES, *WITH_STATE], {"qwen2", "gemma3_text", "qwen3_moe", "qwen3_next"})
)
def test_what_is_loaded_is_what_transformers_loads(
    alone: Layout, tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, family, torch.bfloat16)
    with caplog.at_level(logging.INFO, "burnish"):
        prove(alone, tmp_path)
    [record] = [r for r in caplog.records if r.name == "burnish"]
    assert isinstance(record.args, tuple)
    assert float(str(record.args[0])) < 1e-4


@pytest.mark.parametrize(
    ("precision", "name", "factor"),
    [
        ("fp32", "model.layers.1.self_attn.v_proj.weight", -1.0),
        ("fp32", "lm_head.weight", 1.01),
        ("fp32", "model.embed_tokens.weight", 0.0),
        ("bf16", "lm_head.weight", -1.0),
    ],
)
def test_a_tensor_that_was_read_wrongly_is_named(
    alone: Layout, tmp_path: Path, precision: str, name: str, factor: float
) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16)
    prove(alone, tmp_path, precision=precision)
    with pytest.raises(IncompatibleError) as caught:
        prove(alone, tmp_path, (name, factor), precision)
    assert name in caught.value.problem


def test_a_tensor_with_what_is_no_number_is_named(alone: Layout, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(IncompatibleError) as caught:
        prove(alone, tmp_path)
    assert "model.layers.1.mlp.up_proj.weight" in caught.value.problem


def test_an_adapter_s_model_is_compared_without_its_change(alone: Layout, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", torch.bfloat16)
    lora = LoraConfig(rank=2, targets=["q_proj"])
    prove(alone, tmp_path, lora=lora)
    with pytest.raises(IncompatibleError, match=r"layers\.0\.mlp\.up_proj"):
        prove(alone, tmp_path, ("model.layers.0.mlp.up_proj.weight", -1.0), lora=lora)


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_values_are_compared_too(alone: Layout, tmp_path: Path, kind: str) -> None:
    save_classifier(tmp_path, "qwen3", kind)
    prove(alone, tmp_path)
    with pytest.raises(IncompatibleError, match=r"score\.weight"):
        prove(alone, tmp_path, ("score.weight", 0.5))


def test_ranks_refuse_together(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", torch.float32)
    run_ranks(prove, 2, tmp_path)
    with pytest.raises(RankFailed) as caught:
        run_ranks(prove, 2, tmp_path, ("model.layers.1.mlp.down_proj.weight", -1.0))
    assert set(caught.value.failures) == {0, 1}


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["sequence_parallel", "tensor_parallel", "replicas"])
def test_ranks_that_share_a_sequence_or_matrices_are_compared(tmp_path: Path, how: str) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    run_ranks(_proved, 2, tmp_path, how, None)
    with pytest.raises(RankFailed):
        run_ranks(_proved, 2, tmp_path, how, ("lm_head.weight", 1.01))


def _proved(layout: Layout, path: Path, how: str, damage: tuple[str, float] | None) -> None:
    prove(layout, path, damage, **{how: 2})


def test_large_models_and_those_that_transformers_cannot_load_are_said_to_be_skipped(
    alone: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    damage = ("model.norm.weight", -1.0)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "burnish"):
        patch.setattr(loaded, "_MOST_PARAMETERS", 1000)
        prove(alone, tmp_path, damage)
    assert [r.levelname for r in caplog.records] == ["INFO"]

    def fails(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(loaded, "_plain", fails)
    prove(alone, tmp_path, damage)
    assert [r.levelname for r in caplog.records][1:] == ["WARNING"]
