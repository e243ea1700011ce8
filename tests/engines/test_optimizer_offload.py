"""Optimizer state and activations on the host, in every kind of layout: the same numbers, described where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples
from distributed import run_ranks
from engines_for_tests import make_engine
from tiny import VOCAB, save_tiny

from burnish.config.schema import LoraConfig, OptimConfig
from burnish.engines import adamw
from burnish.engines.base import Part
from burnish.parallel.layout import Layout

CASES: dict[str, tuple[OptimConfig, LoraConfig | None]] = {
    "adamw": (OptimConfig(weight_decay=0.1), None),
    "muon": (OptimConfig(kind="muon", weight_decay=0.1), None),
    "adapter": (OptimConfig(), LoraConfig(rank=2)),
}


def compare_rank(layout: Layout, path: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Bytes in the arena, by case, after the same steps with and without it gave the same in every bit."""
    adamw._WAVE = 20_000  # so that a step takes several
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
            with engines[0].parked():
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
        (2, {}),
        (2, {"replicas": 2}),
        (2, {"tensor_parallel": 2, "activation_checkpointing": "full"}),
        (2, {"sequence_parallel": 2}),
    ],
)
def test_nothing_changes_in_any_layout(
    tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    for rank in run_ranks(compare_rank, world, path, settings):
        assert all(beyond >= 0 for beyond in rank.values()), rank
