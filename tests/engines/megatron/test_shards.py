"""Weights and moments as shards: what is written into the pieces of any layout is what the model has, and comes out of them.

Values are numbers that say which element of which tensor they are, so that nothing can be mistaken for
anything else, and the pieces of all ranks together are compared bit for bit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from contracts.engine import whole
from support.models.tiny import tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Shard
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.models.meta_init import build_on_meta
from burnish.models.names import tensor_specs

CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp 2": (2, {}),
    "dp 3": (3, {}),
    "tp 2": (2, {"tensor_parallel": 2}),
    "pp 2": (2, {"pipeline_parallel": 2}),
    "vpp": (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    "ep 2": (2, {"expert_parallel": 2}),
    "dp 2 x tp 2": (4, {"tensor_parallel": 2}),
    "dp 2 x pp 2": (4, {"pipeline_parallel": 2}),
    "ep 2 x etp 1": (4, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}),
}
MODELS = {
    "moe": ("qwen3_moe", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "dense": ("qwen2", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
}


def numbered(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor like no other, in fp32 that bf16 cannot hold."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


class Numbered:
    """A source of such tensors."""

    def fill(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            shard.tensor.copy_(numbered(shard.spec.name, shard.spec.shape)[shard.box.slices])


def rank(layout: Layout, names: list[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By layout, kind of model and precision: what this rank holds."""
    return {
        (name, kind, precision): filled(layout, config_of(kind), LAYOUTS[name][1], precision)
        for name in names
        for kind in MODELS
        for precision in ("fp32", "bf16")
        if kind == "moe" or "expert_parallel" not in LAYOUTS[name][1]
    }


def filled(
    layout: Layout, config: PretrainedConfig, settings: dict[str, Any], precision: str
) -> dict[str, Any]:
    engine = MegatronEngine(
        config,
        EngineConfig(kind="megatron", precision=precision, **settings),
        OptimConfig(),
        layout=layout,
        device=CPU,
    )
    for part in (Part.TRAINING, Part.WEIGHTS):
        engine.load(Numbered(), part)
    found = {
        "trained": list(described(engine.shards(Part.WEIGHTS))),
        "slots": list(described(engine.shards(Part.TRAINING))),
        "model": list(described(engine.published().changing)),
    }
    engine.close()
    return found


def config_of(kind: str) -> PretrainedConfig:
    family, changes = MODELS[kind]
    return tiny_config(family, **changes)


def described(shards: Iterator[Shard]) -> Iterator[tuple[str, Any, Tensor]]:
    for shard in shards:
        yield shard.spec.name, shard.box, shard.tensor.clone()


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(each, marks=pytest.mark.nightly) for each in (2, 3, 4))]
)
def test_what_is_filled_comes_out(world: int) -> None:
    names = [name for name, (processes, _) in LAYOUTS.items() if processes == world]
    ranks = run_ranks(rank, world, names)
    for name, kind, precision in ranks[0]:
        held = [each[name, kind, precision] for each in ranks]
        shapes = {spec.name: spec.shape for spec in tensor_specs(build_on_meta(config_of(kind)))}
        slots = {
            f"{slot}/{each}": shape
            for slot in ("exp_avg", "exp_avg_sq")
            for each, shape in shapes.items()
        }
        computing = torch.float32 if precision == "fp32" else torch.bfloat16
        require_numbered(held, "trained", shapes, torch.float32)
        require_numbered(held, "slots", slots, torch.float32)
        require_numbered(held, "model", shapes, computing)
        require_held_once(held, kind, LAYOUTS[name][1], shapes)


def require_numbered(
    ranks: list[dict[str, Any]],
    key: str,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    assert {piece[2].dtype for rank in ranks for piece in rank[key]} == {dtype}
    found = whole([rank[key] for rank in ranks], shapes)
    assert found.keys() == shapes.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, numbered(name, shapes[name]).to(dtype).float()), name


def require_held_once(
    ranks: list[dict[str, Any]],
    kind: str,
    settings: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Over data-parallel ranks nothing is held twice, over tensor ranks only what is not cut."""
    every = sum(math.prod(shape) for shape in shapes.values())
    held = sum(piece[2].numel() for rank in ranks for piece in rank["trained"])
    if "tensor_parallel" in settings:
        assert every <= held < 1.2 * every
        return
    tied = kind == "moe" and "pipeline_parallel" in settings
    assert held == every + tied * math.prod(shapes["model.embed_tokens.weight"])
