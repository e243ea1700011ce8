"""Building and loading a model takes its own shard and a small budget, at every kind of layout, with both engines.

Fresh weights take one whole module more, as transformers' own functions draw them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.models.tiny import tiny_config
from support.nightly import by_day
from support.ranks.processes import run_ranks
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.device import peak_memory, reset_peak_memory, used_memory
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.factory import make_engine
from burnish.engines.optim.optimizer import local
from burnish.models.loading import FreshSource, SafetensorsSource
from burnish.models.lora.adapter import FreshAdapter
from burnish.models.meta_init import build_on_meta
from burnish.models.names import tensor_specs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CPU, BUDGET = torch.device("cpu"), 64e6
SHAPE = {"hidden_size": 1024, "vocab_size": 8000, "intermediate_size": 4096, "num_hidden_layers": 3}
LARGEST_MODULE = 4 * SHAPE["hidden_size"] * SHAPE["vocab_size"]


def peak_beyond_shard(layout, path, fresh, settings, optim=None, lora=None):
    """The rank's bytes of weights and of the optimizer's state (and of Megatron's buffers), and what building and loading took beyond them at the peak."""
    config, told = (
        AutoConfig.from_pretrained(path),
        EngineConfig(**{"precision": "bf16", **settings}),
    )
    if told.kind == "megatron":  # whose code is loaded when it is asked for
        small = tiny_config(config.model_type)
        make_engine(small, told, optim, layout=layout, device=CPU).close()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory(CPU)
    before = used_memory(CPU)
    engine = make_engine(config, told, optim, layout=layout, device=CPU, lora=lora)
    base = Part.FROZEN if lora else Part.WEIGHTS
    engine.load(FreshSource(config, 0) if fresh else SafetensorsSource(Path(path)), base)
    if lora:
        engine.load(FreshAdapter(0), Part.WEIGHTS)
    peak = peak_memory(CPU) - before
    parts = {base, Part.WEIGHTS, *([Part.TRAINING] if optim else [])}
    held = [local(shard.tensor) for part in parts for shard in engine.shards(part)]
    if told.kind == "megatron":  # what it computes with lies beside what it steps
        weights = [p.data for chunk in engine._chunks for p in chunk.parameters()]
        held += [*weights, *engine._optimizer.tensors()]
        peak -= sum(weight.nbytes for weight in weights)  # as they were made; malloc may keep that
    shard = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
    beyond = peak - shard
    engine.close()
    return shard, beyond


def saved(path, family, **more):
    config = tiny_config(family, **SHAPE | more)
    specs = tensor_specs(build_on_meta(config))
    tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
    save_file(tensors, path / "model.safetensors")
    config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """90 MB in bf16, 180 MB in fp32."""
    return saved(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """As many, most of them in two mixtures of 8 experts."""
    return saved(
        tmp_path_factory.mktemp("experts"), "qwen3_moe", num_experts=8, moe_intermediate_size=512
    )


TAKEN = [
    (1, 1, {}, False),
    (2, 2, {}, True),
    (2, 2, {"tensor_parallel": 2}, False),
    (1, 1, {}, True),
    (2, 2, {}, False),
    (4, 2, {"replicas": 2}, False),
    (2, 2, {"sequence_parallel": 2}, False),
    (4, 4, {"tensor_parallel": 2}, False),
]


@pytest.mark.parametrize(
    ("world", "parts", "settings", "fresh"),
    by_day(TAKEN, TAKEN[:3]),
)
def test_initialising_and_loading_take_the_shard_and_a_budget(model, world, parts, settings, fresh):
    told = settings | {"precision": "fp32"}
    for shard, beyond in run_ranks(peak_beyond_shard, world, str(model), fresh, told):
        assert shard > 160e6 / parts
        assert beyond < BUDGET + LARGEST_MODULE * fresh


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {}),
        (2, {"tensor_parallel": 2}),
        (4, {"replicas": 2, "sequence_parallel": 2}),
        (4, {"sequence_parallel": 2, "tensor_parallel": 2}),
    ],
)
@pytest.mark.contract
def test_mixtures_and_mixed_layouts_take_the_shard_and_a_budget(experts, world, settings):
    told = settings | {"precision": "fp32"}
    for shard, beyond in run_ranks(peak_beyond_shard, world, str(experts), False, told):
        assert shard > 160e6 / world
        assert beyond < BUDGET


@pytest.mark.parametrize(
    ("world", "settings", "mixture"),
    [
        (2, {"tensor_parallel": 2}, False),
        (2, {"pipeline_parallel": 2}, False),
        (2, {"expert_parallel": 2}, True),
        (2, {}, False),
        (2, {"sequence_parallel": 2}, False),
        (4, {"tensor_parallel": 2}, False),
    ],
)
@pytest.mark.contract
def test_megatron_takes_what_it_keeps_and_a_budget(model, experts, world, settings, mixture):
    """Its own weights, a buffer of gradients, what its optimizer steps and the moments of that."""
    told = settings | {"kind": "megatron", "precision": "bf16"}
    path = str(experts if mixture else model)
    for shard, beyond in run_ranks(peak_beyond_shard, world, path, False, told, OptimConfig()):
        assert shard > 120e6
        assert beyond < BUDGET


def megatron_among_many(_layout):
    """Bytes allocated when an engine has been made that shares its optimizer's state with 15 others, and while it was."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    config = tiny_config("qwen3", hidden_size=256, vocab_size=2048)
    settings, layout = EngineConfig(kind="megatron", precision="bf16"), Layout(0, 16, 0, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine = make_engine(config, settings, OptimConfig(), layout=layout, device=CPU)
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    running = list(accumulate(event.nbytes() for event in events))
    engine.close()
    return running[-1], max(running)


def test_megatrons_weights_are_not_there_twice_while_it_is_made():
    """Weights, gradients and a 16th of the rest are 6.75 bytes an element; twice the weights and gradients were 8."""
    [(left, peak)] = run_ranks(megatron_among_many, 1)
    assert left > 4e6
    assert peak < 1.05 * left


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["model", "adapter"])
def test_what_is_trained_takes_the_shard_and_a_budget(model, lora):
    """With two moments in fp32; a model beside an adapter is in bf16."""
    told = (str(model), False, {}, OptimConfig(), lora)
    for shard, beyond in run_ranks(peak_beyond_shard, 2, *told):
        assert shard > (80e6 if lora else 480e6) / 2
        assert beyond < BUDGET
