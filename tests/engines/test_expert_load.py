"""Biases of routers that follow the load, on both engines, against numpy and the routers of plain transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.engine import cut, examples_that_begin_alike, loss
from support.models.engines import make_engine
from support.models.routers import by_hand, experts_of_others, recorded, with_experts
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.config.schema import EngineConfig
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part
from burnish.engines.factory import require_fitting, settings_beside
from burnish.errors import UsageError
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

RATE = 0.05
MEGATRON: dict[str, Any] = {"kind": "megatron"}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"activation_checkpointing": "full"}, MEGATRON],
    2: [
        {},
        {"sequence_parallel": 2},
        {"tensor_parallel": 2, "router_aux_loss": 0.01},
        {"expert_parallel": 2},
        MEGATRON | {"tensor_parallel": 2, "activation_checkpointing": "full"},
        MEGATRON | {"pipeline_parallel": 2, "router_aux_loss": 0.01},
        MEGATRON | {"pipeline_parallel": 2, "virtual_stages": 2},
        MEGATRON | {"sequence_parallel": 2},
        MEGATRON | {"expert_parallel": 2},
    ],
}


def biases(engine: Engine) -> list[np.ndarray]:
    """Those of all routers, in order, the same on every rank."""
    mine = {
        shard.spec.name: shard.tensor.numpy().copy()
        for shard in engine.shards(Part.WEIGHTS)
        if shard.spec.name.endswith("e_score_correction_bias")
    }
    found: dict[str, np.ndarray] = {}
    for held in gather_objects(mine, engine.layout):
        for name, bias in held.items():
            assert np.array_equal(found.setdefault(name, bias), bias)
    return [found[name] for name in sorted(found)]


def moved(before: Sequence[np.ndarray], experts: Sequence[Tensor]) -> list[np.ndarray]:
    """Algorithm 1 of arXiv 2408.15664 for experts [T, L, k]."""
    chosen = np.concatenate([each.numpy() for each in experts])
    loads = [np.bincount(chosen[:, router].ravel(), minlength=4) for router in range(2)]
    return [
        bias + np.float32(RATE) * np.sign(load.mean() - load).astype(np.float32)
        for bias, load in zip(before, loads, strict=True)
    ]


def not_finite(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    return outputs.logprobs.sum() * torch.inf, Stats()


def updated_rank(
    layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    found = []
    for settings in layouts:
        engine = make_engine(layout, path, router_bias_update_rate=RATE, **settings)
        batch = cut(examples_that_begin_alike(VOCAB), engine.layout, 2)
        steps = [biases(engine)]
        chosen = []
        for told in (batch, batch, with_experts(batch, experts_of_others())):
            chosen.append(recorded(engine, told))
            engine.forward_backward(told, loss)
            engine.optim_step(1e-3)
            steps.append(biases(engine))
        engine.forward_backward(batch, not_finite)
        assert engine.optim_step(1e-3).values_by_name()["skipped"] == 1
        steps.append(biases(engine))
        for _ in range(2):  # a step of two passes
            engine.forward_backward(batch, loss)
        stats = engine.optim_step(0.0).values_by_name()
        found.append({"steps": steps, "chosen": chosen, "last": biases(engine), **stats})
        engine.close()
    return found


def require_updated(path: Path, world: int, layouts: Sequence[Mapping[str, Any]]) -> None:
    own = by_hand(path, None)["own"]
    for settings, found in zip(
        layouts, run_ranks(updated_rank, world, path, layouts)[0], strict=True
    ):
        steps = found["steps"]
        for step, chosen in enumerate([dict(enumerate(own)), *found["chosen"][1:]]):
            wanted = moved(steps[step], [chosen[number] for number in sorted(chosen)])
            for router, bias in enumerate(wanted):
                assert np.array_equal(steps[step + 1][router], bias), (settings, step, router)
            assert not all(map(np.array_equal, wanted, steps[step]))
        assert all(map(np.array_equal, steps[-1], steps[-2])), settings
        assert not all(map(np.array_equal, steps[-1], found["last"])), settings
        assert 1 < found["moe/load_imbalance"] <= 2


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_biases_follow_the_load_of_a_whole_step(tmp_path: Path, world: int) -> None:
    deep = {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    path = save_tiny(tmp_path / "m", "glm4_moe", torch.float32, **deep)
    require_updated(path, world, LAYOUTS[world])


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["minimax_m2", "ernie4_5_moe"])
def test_biases_beside_a_router_or_that_ranks_divide_do_so_too(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    kept = ("tensor_parallel", "virtual_stages")
    layouts = [each for each in LAYOUTS[2] if "kind" in each or not set(kept) & set(each)]
    require_updated(path, 2, [each for each in layouts if "virtual_stages" not in each])


def test_biases_stay_as_loaded_where_nothing_is_said(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "glm4_moe", torch.float32)
    for before, after in run_ranks(left_rank, 1, path, ("torch", "megatron"))[0]:
        assert all(map(np.array_equal, before, after))


def left_rank(layout: Layout, path: Path, kinds: Sequence[str]) -> list[Any]:
    found = []
    for kind in kinds:
        engine = make_engine(layout, path, kind=kind)
        before = biases(engine)
        engine.forward_backward(cut(examples_that_begin_alike(VOCAB), layout, 2), loss)
        assert "moe/load_imbalance" not in engine.optim_step(1e-3).values_by_name()
        found.append((before, biases(engine)))
        engine.close()
    return found


def test_routers_without_a_bias_are_refused() -> None:
    config = EngineConfig(precision="bf16", router_bias_update_rate=RATE)
    for family in ("mixtral", "qwen3"):
        with pytest.raises(UsageError, match=r"engine\.router_bias_update_rate"):
            require_fitting(tiny_config(family), config)
    require_fitting(tiny_config("glm4_moe"), config)
    assert settings_beside(tiny_config("mixtral"), config).router_bias_update_rate == 0
    assert settings_beside(tiny_config("glm4_moe"), config).router_bias_update_rate == RATE
