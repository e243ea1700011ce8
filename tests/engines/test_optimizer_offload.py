"""Optimizer state and activations on the host, in every kind of layout: the same numbers, described where they lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples
from support.models.engines import CPU, make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.engines import offload as resting
from burnish.engines.base import Part
from burnish.engines.optim.muon import Muon
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import BurnishError
from burnish.models.meta_init import build_on_meta
from burnish.models.names import regions

CASES: dict[str, tuple[OptimConfig, LoraConfig | None]] = {
    "adamw": (OptimConfig(weight_decay=0.1), None),
    "muon": (OptimConfig(kind="muon", weight_decay=0.1), None),
    "adapter": (OptimConfig(moments="bf16"), LoraConfig(rank=2)),
}


def compare_rank(layout: Layout, path: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Bytes in the arena, by case, after the same steps with and without it gave the same in every bit."""
    resting.WAVE = 20_000  # so that a step takes several
    found = {}
    for case, (optim, lora) in CASES.items():
        engines = [
            make_engine(
                layout,
                path,
                optim,
                lora=lora,
                optimizer_offload=moves,
                activation_offload=moves,
                **settings,
            )
            for moves in (True, False)
        ]
        batch = cut(make_examples(VOCAB), engines[0].layout, 3)
        for _ in range(3):
            for engine in engines:
                engine.forward_backward(batch, loss)
                engine.optim_step(LR)
            with engines[0].offloaded():
                pass
        for part in (Part.WEIGHTS, Part.TRAINING):
            for mine, theirs in zip(*(engine.shards(part) for engine in engines), strict=True):
                assert mine.spec == theirs.spec
                assert torch.equal(mine.tensor, theirs.tensor), (case, mine.spec.name)
        slots = sum(shard.tensor.nbytes for shard in engines[0].shards(Part.TRAINING))
        found[case] = engines[0].mesh.arena.used - slots
    return found


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.nightly),
        pytest.param(2, {"replicas": 2}, marks=pytest.mark.nightly),
        pytest.param(
            *(2, {"tensor_parallel": 2, "activation_checkpointing": "full"}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(2, {"sequence_parallel": 2}, marks=pytest.mark.nightly),
    ],
)
def test_nothing_changes_in_any_layout(
    tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    for rank in run_ranks(compare_rank, world, path, settings):
        assert all(beyond >= 0 for beyond in rank.values()), rank


class Full(Arena):
    """Has no room."""

    def take(self, size: int) -> Tensor:
        raise BurnishError("the machine has no memory", have=f"{size} bytes wanted")


def said_rank(layout: Layout) -> list[str]:
    """What is said where the last rank has no room: in making the optimizer, in parking."""
    mesh = Mesh.of(layout, 1, CPU)
    full = replace(mesh, arena=Full(CPU)) if layout.rank == layout.world - 1 else mesh

    def engine(*, moves: bool) -> TorchEngine:
        config, model = (
            EngineConfig(precision="bf16", optimizer_offload=moves),
            tiny_config("qwen3"),
        )
        with patch.object(Mesh, "of", return_value=full):
            return TorchEngine(model, config, OptimConfig(), layout=layout, device=CPU)

    with pytest.raises(BurnishError) as made:
        engine(moves=True)
    with pytest.raises(BurnishError) as parked, engine(moves=False).offloaded():
        pass
    return [str(made.value), str(parked.value)]


def test_every_rank_is_told_where_one_has_no_room() -> None:
    first, last = run_ranks(said_rank, 2)
    for mine, theirs in zip(first, last, strict=True):
        assert mine == f"rank 1: {theirs}"


def muon_rank(layout: Layout) -> str:
    """What is said where the last rank has no room for momentum alone."""
    arena = Full(CPU) if layout.rank == layout.world - 1 else Arena(CPU)
    model = build_on_meta(tiny_config("llama"))
    weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(BurnishError) as caught:
        Muon.of_model(model, regions(model), weights, OptimConfig(kind="muon"), layout, arena)
    return str(caught.value)


def test_every_rank_is_told_where_one_has_no_room_for_momentum() -> None:
    first, last = run_ranks(muon_rank, 2)
    assert first == f"rank 1: {last}"
