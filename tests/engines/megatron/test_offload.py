"""Megatron's moments on the host, in fp32 and in bf16: the same numbers in every bit as beside the weights, described where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples
from support.models.engines import CPU, OPTIM, make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines import offload as resting
from burnish.engines.base import Part
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.errors import BurnishError

NARROW = OPTIM.model_copy(update={"moments": "bf16"})
CASES: list[tuple[str, dict[str, Any], OptimConfig]] = [
    ("dense", {"precision": "bf16"}, NARROW),
    ("dense", {"tensor_parallel": 2}, OPTIM),
    ("dense", {"pipeline_parallel": 2, "virtual_stages": 2}, OPTIM),
    ("mixture", {"expert_parallel": 2}, NARROW),
]


def steps_of(
    layout: Layout, path: Path, settings: dict[str, Any], optim: OptimConfig
) -> tuple[list[tuple[str, Tensor]], int]:
    """What three steps, between which the engine is parked, leave of weights and moments; the bytes in the arena."""
    engine = make_engine(layout, path, optim, kind="megatron", **settings)
    batch = cut(make_examples(VOCAB), engine.layout, 3)
    for _ in range(3):
        engine.forward_backward(batch, loss)
        engine.optim_step(LR)
        with engine.offloaded():
            pass
    held = [
        (shard.spec.name, shard.tensor.clone())
        for part in (Part.WEIGHTS, Part.TRAINING)
        for shard in engine.shards(part)
    ]
    used = engine.mesh.arena.used
    engine.close()
    return held, used


def compare_rank(
    layout: Layout,
    paths: dict[str, Path],
    cases: Sequence[tuple[str, dict[str, Any], OptimConfig]],
) -> None:
    resting.WAVE = 5_000  # so that a step takes several
    for kind, settings, optim in cases:
        plain, nothing = steps_of(layout, paths[kind], settings, optim)
        moved, used = steps_of(layout, paths[kind], settings | {"optimizer_offload": True}, optim)
        assert nothing == 0
        assert used >= sum(t.nbytes for name, t in moved if name.startswith("exp_avg")), settings
        for (name, mine), (other, theirs) in zip(moved, plain, strict=True):
            assert name == other
            is_narrow = name.startswith("exp_avg") and optim.moments == "bf16"
            assert theirs.dtype is (torch.bfloat16 if is_narrow else torch.float32), name
            assert torch.equal(mine, theirs), (settings, name)


@pytest.mark.parametrize(
    "cases", [CASES[-1:], pytest.param(CASES[:-1], marks=pytest.mark.nightly)], ids=len
)
def test_nothing_changes_in_any_layout(
    tmp_path: Path, cases: Sequence[tuple[str, dict[str, Any], OptimConfig]]
) -> None:
    layers = {"num_hidden_layers": 4}
    paths = {
        "dense": save_tiny(tmp_path / "dense", "qwen3", torch.float32, **layers),
        "mixture": save_tiny(tmp_path / "mixture", "qwen3_moe", torch.float32, **layers),
    }
    run_ranks(compare_rank, 2, paths, cases)


class Full(Arena):
    """Has no room."""

    def take(self, size: int) -> Tensor:
        raise BurnishError("the machine has no memory", have=f"{size} bytes wanted")


def full_rank(layout: Layout) -> str:
    """What is said where the last rank has no room."""
    config = EngineConfig(kind="megatron", precision="bf16", optimizer_offload=True)
    mesh = MegatronMesh.of(config, CPU)
    if layout.rank == layout.world - 1:
        mesh = replace(mesh, arena=Full(CPU))
    full = patch.object(MegatronMesh, "of", return_value=mesh)
    with full, pytest.raises(BurnishError) as caught:
        MegatronEngine(tiny_config("qwen3"), config, OPTIM, layout=layout, device=CPU)
    return str(caught.value)


def test_every_rank_is_told_where_one_has_no_room() -> None:
    said: Sequence[str] = run_ranks(full_rank, 2)
    assert said[0] == f"rank 1: {said[1]}"
