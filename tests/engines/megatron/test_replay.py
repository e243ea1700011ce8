"""Experts recorded, prescribed and evened out by Megatron at every layout, against one plain transformers model in fp32.

What either engine has recorded the other replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.engine import assert_relative, cut, examples_that_begin_alike, loss
from support.models.engines import OPTIM, make_engine
from support.models.routers import (
    WEIGHT,
    by_hand,
    checkpoint_name,
    experts_of_others,
    recorded,
    with_experts,
)
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks

from burnish.check.comparison import step_of_engine
from burnish.config.schema import EngineConfig
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.engines import factory as making
from burnish.engines.base import Engine
from burnish.errors import BurnishError, IncompatibleError, UsageError
from burnish.records import Batch

DEGREES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [
        {"expert_parallel": 2},
        {"pipeline_parallel": 2},
        {"tensor_parallel": 2},
        {"sequence_parallel": 2},
        {"expert_tensor_parallel": 2},
        {"tensor_parallel": 2, "expert_tensor_parallel": 1},
    ],
    4: [
        {"tensor_parallel": 2, "pipeline_parallel": 2},
        {"expert_parallel": 2, "pipeline_parallel": 2},
    ],
}
MORE: dict[int, list[dict[str, int]]] = {
    4: [
        {"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1},
        {"expert_parallel": 2, "tensor_parallel": 2},
        {"expert_parallel": 2, "sequence_parallel": 2},
        {"sequence_parallel": 2, "pipeline_parallel": 2},
        {"sequence_parallel": 2, "tensor_parallel": 2},
    ],
}
"""What `make contract` runs beside these."""
VIRTUAL = {"pipeline_parallel": 2, "virtual_stages": 2}
RECOMPUTED = ("full", "none", "selective")
CROSSED: list[dict[str, Any]] = [
    {},
    {"kind": "megatron", "expert_parallel": 2},
    {"tensor_parallel": 2},
    {"kind": "megatron", "tensor_parallel": 2},
    {"kind": "megatron", "sequence_parallel": 2},
    {"kind": "megatron", **VIRTUAL},
]
"""Of both engines; what the first two record all replay."""


def routed_rank(
    layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    found = []
    for settings in ({"kind": "megatron", **each} for each in layouts):
        engine = make_engine(layout, path, **settings)
        batch = cut(examples_that_begin_alike(VOCAB), engine.layout, 2)
        told = with_experts(batch, experts_of_others())
        own = recorded(engine, batch)
        found.append(
            {
                "own": own,
                "told": recorded(engine, told),
                "prescribed": step_of_engine(engine, told, loss, OPTIM),
            }
        )
        engine.close()
        evened = make_engine(layout, path, router_aux_loss=WEIGHT, **settings)
        found[-1]["evened"] = step_of_engine(evened, batch, loss, OPTIM)
        evened.close()
    return found if layout.is_main else []


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m", "mixtral", torch.float32)


@pytest.fixture(scope="module")
def oracles(path: Path) -> dict[str, dict[str, Any]]:
    return {"prescribed": by_hand(path, experts_of_others()), "evened": by_hand(path, None)}


def test_layouts_route_like_one_plain_model(path: Path, oracles: dict[str, dict[str, Any]]) -> None:
    require_routed(path, oracles, 2, recomputing(DEGREES[2][:2]))


@pytest.mark.nightly
@pytest.mark.parametrize("world", DEGREES)
def test_every_layout_routes_like_one_plain_model(
    path: Path, oracles: dict[str, dict[str, Any]], world: int
) -> None:
    require_routed(path, oracles, world, recomputing(DEGREES[world]))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_routers_by_sigmoid_or_with_a_bias_do_so_too(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    oracles = {"prescribed": by_hand(path, experts_of_others()), "evened": by_hand(path, None)}
    require_routed(path, oracles, 2, recomputing(DEGREES[2]))


def recomputing(layouts: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Each layout with a way to recompute, in turn."""
    return [
        {**degrees, "activation_checkpointing": RECOMPUTED[number % len(RECOMPUTED)]}
        for number, degrees in enumerate(layouts)
    ]


@pytest.mark.contract
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", DEGREES)
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_every_layout_routes_with_every_way_to_recompute(
    path: Path, oracles: dict[str, dict[str, Any]], world: int, recomputed: str
) -> None:
    layouts = [
        {**degrees, "activation_checkpointing": recomputed}
        for degrees in [*DEGREES[world], *MORE.get(world, [])]
    ]
    require_routed(path, oracles, world, layouts)


def require_routed(
    path: Path,
    oracles: Mapping[str, Mapping[str, Any]],
    world: int,
    layouts: Sequence[Mapping[str, Any]],
) -> None:
    """Recorded, prescribed and evened out experts are those of the plain model."""
    own = oracles["evened"]["own"]
    outcomes = run_ranks(routed_rank, world, path, layouts)[0]
    for settings, found in zip(layouts, outcomes, strict=True):
        for number, others in enumerate(experts_of_others()):
            # In which order a token's experts are named is of no meaning.
            assert torch.equal(sets(found["own"][number]), sets(own[number])), settings
            assert torch.equal(found["told"][number].long(), others), settings
        assert found["evened"].balance == pytest.approx(oracles["evened"]["aux"], rel=1e-5)
        for kind, numbers in oracles.items():
            outcome = found[kind]
            assert outcome.loss == pytest.approx(numbers["loss"], rel=1e-5), (kind, settings)
            assert outcome.norm == pytest.approx(numbers["norm"], rel=1e-5), (kind, settings)
            for number, logprobs in enumerate(numbers["logprobs"]):
                mine = outcome.logprobs[f"sequence {number}"]
                assert_relative(mine, logprobs, 1e-5, f"{kind} {settings}: sequence {number}")
            for name, gradient in (numbers["gradients"] | numbers["routers"]).items():
                mine = outcome.gradients[checkpoint_name(name, path)]
                assert_relative(mine, gradient, 1e-5, f"{kind} {settings}: {name}")


def sets(experts: torch.Tensor) -> torch.Tensor:
    return experts.long().sort(-1).values


@pytest.mark.nightly
def test_virtual_stages_do_what_one_process_does(tmp_path: Path) -> None:
    """Micro-batches of several stages alternate, and layers are computed again."""
    require_routed_in_stages(tmp_path, 2, [{**VIRTUAL, "activation_checkpointing": "full"}])


@pytest.mark.contract
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_virtual_stages_with_every_way_to_recompute(tmp_path: Path, recomputed: str) -> None:
    degrees: list[dict[str, int]] = [{"expert_parallel": 2}, {"tensor_parallel": 2}]
    degrees.append({"sequence_parallel": 2})
    layouts = [VIRTUAL | each | {"activation_checkpointing": recomputed} for each in degrees]
    require_routed_in_stages(tmp_path, 4, layouts)


def require_routed_in_stages(root: Path, world: int, layouts: Sequence[Mapping[str, Any]]) -> None:
    """What one process of Megatron does, in which layers with experts and without alternate."""
    path = save_tiny(
        root / "m",
        "qwen3_moe",
        torch.float32,
        num_hidden_layers=6,
        mlp_only_layers=[0, 2, 4, 5],
    )
    (one,) = run_ranks(routed_rank, 1, path, [{}])[0]
    outcomes = run_ranks(routed_rank, world, path, layouts)[0]
    for settings, many in zip(layouts, outcomes, strict=True):
        for kind in ("own", "told"):
            for number, experts in one[kind].items():
                assert torch.equal(many[kind][number], experts), settings
        assert many["evened"].balance == pytest.approx(one["evened"].balance, rel=1e-5)
        for kind in ("prescribed", "evened"):
            assert many[kind].loss == pytest.approx(one[kind].loss, rel=1e-5), (kind, settings)
            for name, gradient in one[kind].gradients.items():
                mine = many[kind].gradients[name]
                assert_relative(mine, gradient, 1e-5, f"{kind} {settings}: {name}")


def said(engine: Engine, batch: Batch) -> dict[int, np.ndarray]:
    """The log-probs of each sequence, from all ranks."""
    outputs = engine.forward(batch)
    mine = batch.by_example([output.logprobs.numpy() for output in outputs])
    return {n: held for each in gather_objects(mine, engine.layout) for n, held in each.items()}


def crossed_rank(
    layout: Layout, path: Path, other: Path, layouts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """By layout: the experts that the other model chooses, and what the model says alone and with those of the first two layouts."""
    found: list[dict[str, Any]] = []
    for settings in layouts:
        engine = make_engine(layout, other, **settings)
        found.append(
            {"chosen": recorded(engine, cut(examples_that_begin_alike(VOCAB), engine.layout, 2))}
        )
        engine.close()
    for outcome, settings in zip(found, layouts, strict=True):
        engine = make_engine(layout, path, **settings)
        batch = cut(examples_that_begin_alike(VOCAB), engine.layout, 2)
        outcome["alone"] = said(engine, batch)
        records = [[each["chosen"][number] for number in range(5)] for each in found[:2]]
        outcome["replayed"] = [said(engine, with_experts(batch, record)) for record in records]
        engine.close()
    return found if layout.is_main else []


@pytest.mark.nightly
def test_what_one_engine_records_the_other_replays(tmp_path: Path) -> None:
    """Experts that a model of other weights has chosen."""
    path, other = (
        save_tiny(tmp_path / name, "mixtral", torch.float32, num_hidden_layers=4, seed=seed)
        for seed, name in enumerate(("m", "other"))
    )
    outcomes = run_ranks(crossed_rank, 2, path, other, CROSSED)[0]
    first = outcomes[0]
    for settings, found in zip(CROSSED, outcomes, strict=True):
        for number, experts in first["chosen"].items():
            assert torch.equal(sets(found["chosen"][number]), sets(experts)), settings
        for replayed in found["replayed"]:
            for number, wanted in first["replayed"][0].items():
                np.testing.assert_allclose(
                    replayed[number], wanted, rtol=1e-5, atol=1e-6, err_msg=str(settings)
                )
        apart = [abs(found["alone"][n] - found["replayed"][0][n]).max() for n in first["alone"]]
        assert min(apart[:3]) > 1e-2, "of no meaning where the experts are those it would choose"


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_what_does_not_fit_is_refused(path: Path, kind: str) -> None:
    engine = EngineConfig(kind=kind, precision="bf16", router_aux_loss=0.1)
    with pytest.raises(UsageError, match=r"engine\.router_aux_loss"):
        making.require_fitting(tiny_config("qwen3"), engine)
    run_ranks(refusing_rank, 1, path, kind)


def refusing_rank(layout: Layout, path: Path, kind: str) -> None:
    engine = make_engine(layout, path, kind=kind)
    batch, whole = cut(examples_that_begin_alike(VOCAB), layout, 5), experts_of_others()
    for have, experts in {
        "34 × 1 × 2 numbers": [each[:, :1] for each in whole],
        "34 × 2 × 1 numbers": [each[..., :1] for each in whole],
        "29 × 2 × 2 numbers": [each[:-1] for each in whole],
        "numbers from -1 to 3": [each.where(each != 1, -1) for each in whole],
        "numbers from 1 to 4": [each + 1 for each in whole],
    }.items():
        with pytest.raises(IncompatibleError) as caught:
            engine.forward_backward(with_experts(batch, experts), loss)
        assert have in str(caught.value)
    told = with_experts(cut(examples_that_begin_alike(VOCAB), layout, 2), whole)
    first, *others = told.microbatches
    some = replace(told, microbatches=(replace(first, experts=None), *others))
    with pytest.raises(BurnishError):
        engine.forward_backward(some, loss)
    engine.close()
