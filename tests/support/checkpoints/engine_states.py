"""States that real engines hold, for tests of what becomes of them when something fails.

The model is as large as `BIG_SHAPES`, so that a step has as many blocks; its embeddings are tied, and a
layer has experts. Left out: training, which the tests of the engine do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Shard
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.meta_init import build_on_meta
from burnish.models.names import tensor_specs
from support.checkpoints.states import bits
from support.models.tiny import tiny_config

ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "Megatron EP 2": (2, {"kind": "megatron", "expert_parallel": 2}),
    "Megatron PP 2": (2, {"kind": "megatron", "pipeline_parallel": 2}),
    "Megatron TP 2": (2, {"kind": "megatron", "tensor_parallel": 2}),
    "FSDP 2": (2, {}),
    "torch TP 2": (2, {"tensor_parallel": 2}),
    "HSDP 2x2": (4, {"replicas": 2}),
}
"""By layout: processes and the engine's settings. With EP 2 the optimizer's flat ranges are cut over both; with
HSDP two processes have the same part of everything."""
RESUMED_BY = {
    "Megatron EP 2": "FSDP 2",
    "Megatron PP 2": "torch TP 2",
    "FSDP 2": "Megatron PP 2",
    "HSDP 2x2": "Megatron TP 2",
}
"""Layouts that save, and which of the other engine goes on from what they leave."""


def config() -> PretrainedConfig:
    """Of the model."""
    return tiny_config(
        "qwen3_moe",
        vocab_size=68000,
        num_hidden_layers=2,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    )


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Of the checkpoint's tensors, by name."""
    return {spec.name: spec.shape for spec in tensor_specs(build_on_meta(config()))}


def make_engine(name: str, layout: Layout) -> MegatronEngine | TorchEngine:
    """At one of the layouts."""
    _, changes = ENGINES[name]
    settings = EngineConfig(precision="fp32", **changes)
    kind = MegatronEngine if settings.kind == "megatron" else TorchEngine
    return kind(config(), settings, OptimConfig(), layout=layout, device=torch.device("cpu"))


def shards_in(
    engine: MegatronEngine | TorchEngine,
    weights: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
) -> dict[str, list[Shard]]:
    """The engine's own pieces of weights and slots, after these have been loaded."""
    engine.load(_Memory(weights), Part.WEIGHTS)
    engine.load(_Memory(slots), Part.TRAINING)
    return {
        "weights": list(engine.shards(Part.WEIGHTS)),
        "training": list(engine.shards(Part.TRAINING)),
    }


def require_loaded(
    engine: MegatronEngine | TorchEngine,
    weights: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
) -> None:
    """Compare the engine's own pieces with these, bit for bit."""
    for part, tensors in ((Part.WEIGHTS, weights), (Part.TRAINING, slots)):
        for shard in engine.shards(part):
            wanted = tensors[shard.spec.name][shard.box.slices]
            assert torch.equal(bits(shard.tensor), bits(wanted)), shard.spec.name


class _Memory:
    """A source that has all tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def fill(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            shard.tensor.copy_(self.tensors[shard.spec.name][shard.box.slices])
