"""Weights and gradients on the host: the same bits as on the device, in every layout that may have them there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import cut, make_examples, train
from support.models.engines import make_engine, make_frozen
from support.models.tiny import VOCAB, save_tiny
from support.ranks.processes import run_ranks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.torch.torch_engine import TorchEngine

CASES: list[dict[str, Any]] = [
    {"activation_checkpointing": "selective"},
    {"replicas": 2, "reduce_each_microbatch": False},
    {"sequence_parallel": 2, "precision": "bf16", "activation_offload": True},
]


def compare_rank(layout: Layout, path: Path, cases: Sequence[dict[str, Any]]) -> None:
    for settings in cases:
        engines = [
            make_engine(layout, path, parameter_offload=moves, **settings)
            for moves in (True, False)
        ]
        offloaded, plain = engines
        assert isinstance(offloaded, TorchEngine)
        assert {policy(module) for module in sharded(offloaded)} == {CPUOffloadPolicy}
        found, wanted = (train(engine, make_examples(VOCAB), 2) for engine in engines)
        assert found["losses"] == wanted["losses"]
        assert found["norms"] == wanted["norms"]
        for part in Part:
            pairs = zip(offloaded.shards(part), plain.shards(part), strict=True)
            for mine, theirs in pairs:
                assert mine.spec == theirs.spec
                assert mine.box == theirs.box
                assert torch.equal(mine.tensor, theirs.tensor), (settings, mine.spec.name)
        batch = cut(make_examples(VOCAB), plain.layout, 2)
        frozen = [
            make_frozen(layout, path, engine, parameter_offload=moves, **settings)
            for engine, moves in zip(engines, (True, False), strict=True)
        ]
        for mine, theirs in zip(*(each.forward(batch) for each in frozen), strict=True):
            assert torch.equal(mine.logprobs, theirs.logprobs), settings


def sharded(engine: TorchEngine) -> list[FSDPModule]:
    return [module for module in engine._scorer.modules() if isinstance(module, FSDPModule)]


def policy(module: FSDPModule) -> type:
    [group] = module._get_fsdp_state()._fsdp_param_groups
    return type(group.offload_policy)


@pytest.mark.parametrize(
    ("world", "cases"), [(1, CASES[:1]), pytest.param(2, CASES, marks=pytest.mark.nightly)]
)
def test_nothing_changes(tmp_path: Path, world: int, cases: list[dict[str, Any]]) -> None:
    # With two tables, ranks that have them on the device would hold other rows, and add up norms in another order.
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, tie_word_embeddings=True)
    run_ranks(compare_rank, world, path, cases)
