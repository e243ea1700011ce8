"""Building and loading a model takes its own shard and a small budget, sharded or not.

Fresh weights take one whole module more, as transformers' own functions draw them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from safetensors.torch import save_file
from tiny import tiny_config
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.engines.base import Part
from burnish.engines.optimizer import local
from burnish.engines.torch_engine import TorchEngine
from burnish.models.loading import FreshSource, SafetensorsSource, build_on_meta
from burnish.models.lora import FreshAdapter
from burnish.models.names import tensor_specs
from burnish.parallel.device import peak_memory, reset_peak_memory, used_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CPU, BUDGET = torch.device("cpu"), 64e6
SHAPE = {"hidden_size": 1024, "vocab_size": 8000, "intermediate_size": 4096, "num_hidden_layers": 3}
LARGEST_MODULE = 4 * SHAPE["hidden_size"] * SHAPE["vocab_size"]


def peak_beyond_shard(layout, path, fresh, settings, optim=None, lora=None):
    """The rank's bytes of weights and of the optimizer's state, and what building and loading took beyond them at the peak."""
    config = AutoConfig.from_pretrained(path)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory(CPU)
    before = used_memory(CPU)
    told = EngineConfig(**settings)
    engine = TorchEngine(config, told, optim, layout=layout, device=CPU, lora=lora)
    base = Part.FROZEN if lora else Part.WEIGHTS
    engine.load(FreshSource(config, 0) if fresh else SafetensorsSource(Path(path)), base)
    if lora:
        engine.load(FreshAdapter(0), Part.WEIGHTS)
    parts = {base, Part.WEIGHTS, *([Part.TRAINING] if optim else [])}
    shard = sum(local(s.tensor).nbytes for part in parts for s in engine.shards(part))
    beyond = peak_memory(CPU) - before - shard
    engine.close()
    return shard, beyond


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """90 MB in bf16, 180 MB in fp32."""
    path = tmp_path_factory.mktemp("model")
    config = tiny_config("qwen3", **SHAPE)
    specs = tensor_specs(build_on_meta(config))
    tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
    save_file(tensors, path / "model.safetensors")
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("world", "parts", "settings", "fresh"),
    [
        (1, 1, {}, False),
        (1, 1, {}, True),
        (2, 2, {}, False),
        (2, 2, {}, True),
        (4, 2, {"replicas": 2}, False),
        (2, 2, {"tensor_parallel": 2}, False),
        (2, 2, {"sequence_parallel": 2}, False),
        (4, 4, {"tensor_parallel": 2}, False),
    ],
)
def test_initialising_and_loading_take_the_shard_and_a_budget(model, world, parts, settings, fresh):
    for shard, beyond in run_ranks(peak_beyond_shard, world, str(model), fresh, settings):
        assert shard > 160e6 / parts
        assert beyond < BUDGET + LARGEST_MODULE * fresh


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["model", "adapter"])
def test_what_is_trained_takes_the_shard_and_a_budget(model, lora):
    """With two moments in fp32; a model beside an adapter is in bf16."""
    told = (str(model), False, {}, OptimConfig(), lora)
    for shard, beyond in run_ranks(peak_beyond_shard, 2, *told):
        assert shard > (80e6 if lora else 480e6) / 2
        assert beyond < BUDGET
