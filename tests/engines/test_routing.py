"""Experts recorded, prescribed and evened out at every layout, against one plain transformers model in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import assert_relative, cut, examples_that_begin_alike, loss
from support.models.engines import CPU, OPTIM, make_engine
from support.models.routers import (
    EXPERTS,
    WEIGHT,
    by_hand,
    checkpoint_name,
    experts_of_others,
    recorded,
    with_experts,
)
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.check.comparison import BatchOutcome, step_of_engine
from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Engine
from burnish.engines.factory import make_engine as make_bare
from burnish.tracking.stats import Stats

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"activation_checkpointing": "full"}, {"activation_offload": True}],
    2: [
        {},
        {"sequence_parallel": 2, "activation_checkpointing": "full"},
        {"tensor_parallel": 2, "activation_checkpointing": "selective"},
        {"expert_parallel": 2, "activation_checkpointing": "full"},
    ],
    4: [
        {"replicas": 2, "activation_checkpointing": "full"},
        {"sequence_parallel": 2, "tensor_parallel": 2},
        {"expert_parallel": 2, "sequence_parallel": 2},
    ],
}
PER_MICRO = {1: 3, 2: 2, 4: 1}


def routed_rank(
    layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    found = []
    for settings in layouts:
        prescribed = make_engine(layout, path, **settings)
        batch = cut(examples_that_begin_alike(VOCAB), prescribed.layout, PER_MICRO[layout.world])
        told = with_experts(batch, experts_of_others())
        evened = make_engine(layout, path, router_aux_loss=WEIGHT, **settings)
        counted = counted_by(evened)
        found.append(
            {
                "own": recorded(prescribed, batch),
                "told": recorded(prescribed, told),
                "prescribed": step_of_engine(prescribed, told, loss, OPTIM),
                "evened": step_of_engine(evened, batch, loss, OPTIM),
                "counted": counted,
            }
        )
    return found if layout.is_main else []


def counted_by(engine: Engine) -> dict[str, float]:
    """Filled with the statistics of the engine's passes to come."""
    found: dict[str, float] = {}
    run = engine.forward_backward

    def noted(*args: Any) -> Stats:
        stats = run(*args)
        found.update(stats.values_by_name())
        return stats

    engine.forward_backward = noted
    return found


def compiled_rank(layout: Layout, path: Path) -> BatchOutcome:
    engine = make_engine(layout, path, compile=True)
    told = with_experts(cut(examples_that_begin_alike(VOCAB), layout, 3), experts_of_others())
    return step_of_engine(engine, told, loss, OPTIM)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m", "mixtral", torch.float32)


@pytest.fixture(scope="module")
def oracles(path: Path) -> dict[str, dict[str, Any]]:
    return {"prescribed": by_hand(path, experts_of_others()), "evened": by_hand(path, None)}


def imbalance(own: Sequence[Tensor]) -> float:
    """The busiest expert's choices over the mean, mean of the routers."""
    layers = torch.cat(list(own)).unbind(1)
    counts = [torch.bincount(layer.flatten(), minlength=EXPERTS).float() for layer in layers]
    return float(torch.stack([each.max() / each.mean() for each in counts]).mean())


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]
)
def test_every_layout_routes_like_one_plain_model(
    path: Path, oracles: dict[str, dict[str, Any]], world: int
) -> None:
    require_routed(path, oracles, world)


@pytest.mark.nightly
@pytest.mark.parametrize("world", LAYOUTS)
def test_routers_by_sigmoid_do_so_too(tmp_path: Path, world: int) -> None:
    path = save_tiny(tmp_path / "m", "glm4_moe", torch.float32)
    oracles = {"prescribed": by_hand(path, experts_of_others()), "evened": by_hand(path, None)}
    require_routed(path, oracles, world)


def require_routed(path: Path, oracles: Mapping[str, Mapping[str, Any]], world: int) -> None:
    outcomes = run_ranks(routed_rank, world, path, LAYOUTS[world])[0]
    for settings, found in zip(LAYOUTS[world], outcomes, strict=True):
        own = oracles["evened"]["own"]
        for number, others in enumerate(experts_of_others()):
            mine = found["own"][number].long().sort().values
            assert torch.equal(mine, own[number].sort().values), settings
            assert torch.equal(found["told"][number].long(), others), settings
        assert found["evened"].balance == pytest.approx(oracles["evened"]["aux"], rel=1e-5), (
            settings
        )
        assert found["counted"]["moe/load_imbalance"] == pytest.approx(imbalance(own), rel=1e-6), (
            settings
        )
        for kind, numbers in oracles.items():
            require_like(found[kind], numbers, path, f"{kind} {settings}")


def require_like(found: BatchOutcome, wanted: Mapping[str, Any], path: Path, case: str) -> None:
    assert found.loss == pytest.approx(wanted["loss"], rel=1e-5), case
    assert found.norm == pytest.approx(wanted["norm"], rel=1e-5), case
    for number, logprobs in enumerate(wanted["logprobs"]):
        mine = found.logprobs[f"sequence {number}"]
        assert_relative(mine, logprobs, 1e-5, f"{case}: sequence {number}")
    for name, gradient in (wanted["gradients"] | wanted["routers"]).items():
        mine = found.gradients[checkpoint_name(name, path)]
        assert_relative(mine, gradient, 1e-5, f"{case}: {name}")


@pytest.mark.contract
def test_a_compiled_model_sends_tokens_where_it_is_told(
    path: Path, oracles: dict[str, dict[str, Any]]
) -> None:
    (found,) = run_ranks(compiled_rank, 1, path)
    require_like(found, oracles["prescribed"], path, "compiled")


def test_a_model_that_is_only_asked_need_have_no_routers() -> None:
    config = EngineConfig(precision="bf16", router_aux_loss=0.1)
    with process_group(CPU, 60) as layout:
        make_bare(tiny_config("qwen3"), config, None, layout=layout, device=CPU).close()
