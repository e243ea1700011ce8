"""Experts recorded, prescribed and evened out by Megatron at every layout, against one plain transformers model in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import BETAS, CLIP, assert_relative, cut, loss
from distributed import run_ranks
from routers_for_tests import (
    WEIGHT,
    by_hand,
    examples,
    experts_of_others,
    recorded,
    with_experts,
)
from tiny import save_tiny, tiny_config
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.engines.base import Part
from burnish.engines.megatron.engine import MegatronEngine
from burnish.engines.megatron.fitting import require_fitting
from burnish.engines.megatron.replay import RouterReplay
from burnish.errors import BurnishError, IncompatibleError, UsageError
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout
from burnish.trainers.check import step_of_engine

OPTIM = OptimConfig(betas=BETAS, weight_decay=0.1)
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"activation_checkpointing": "full"}],
    2: [
        {"expert_parallel": 2, "activation_checkpointing": "full"},
        {"pipeline_parallel": 2},
        {"tensor_parallel": 2, "activation_checkpointing": "full"},
        {"sequence_parallel": 2},
    ],
    4: [{"tensor_parallel": 2, "pipeline_parallel": 2}],
}
VIRTUAL = {"pipeline_parallel": 2, "virtual_stages": 2, "activation_checkpointing": "full"}


def make_engine(layout: Layout, path: Path, settings: Mapping[str, Any]) -> MegatronEngine:
    config = EngineConfig(
        kind="megatron", precision="fp32", max_grad_norm=CLIP, logprob_chunk=5, **settings
    )
    hf_config = AutoConfig.from_pretrained(path)
    engine = MegatronEngine(hf_config, config, OPTIM, layout=layout, device=torch.device("cpu"))
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    return engine


def routed_rank(
    layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    found = []
    for settings in layouts:
        engine = make_engine(layout, path, settings)
        batch = cut(examples(), engine.layout, 2)
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
        evened = make_engine(layout, path, {**settings, "router_aux_loss": WEIGHT})
        found[-1]["evened"] = step_of_engine(evened, batch, loss, OPTIM)
        evened.close()
    assert not RouterReplay.global_router_replay_instances
    return found if layout.is_main else []


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m", "mixtral", torch.float32)


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_routes_like_one_plain_model(path: Path, world: int) -> None:
    oracles = {"prescribed": by_hand(path, experts_of_others()), "evened": by_hand(path, None)}
    own = oracles["evened"]["own"]
    outcomes = run_ranks(routed_rank, world, path, LAYOUTS[world], timeout=280)[0]
    for settings, found in zip(LAYOUTS[world], outcomes, strict=True):
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
                mine = outcome.gradients[name.replace(".mlp.gate", ".block_sparse_moe.gate")]
                assert_relative(mine, gradient, 1e-5, f"{kind} {settings}: {name}")


def sets(experts: torch.Tensor) -> torch.Tensor:
    return experts.long().sort(-1).values


def test_virtual_stages_do_what_one_process_does(tmp_path: Path) -> None:
    """Micro-batches of several stages alternate, and layers are computed again."""
    path = save_tiny(
        tmp_path / "m",
        "qwen3_moe",
        torch.float32,
        num_hidden_layers=6,
        mlp_only_layers=[0, 2, 4, 5],
    )
    (one,) = run_ranks(routed_rank, 1, path, [{}], timeout=200)[0]
    (many,) = run_ranks(routed_rank, 2, path, [VIRTUAL], timeout=200)[0]
    for kind in ("own", "told"):
        for number, experts in one[kind].items():
            assert torch.equal(many[kind][number], experts)
    assert many["evened"].balance == pytest.approx(one["evened"].balance, rel=1e-5)
    for kind in ("prescribed", "evened"):
        assert many[kind].loss == pytest.approx(one[kind].loss, rel=1e-5)
        for name, gradient in one[kind].gradients.items():
            assert_relative(many[kind].gradients[name], gradient, 1e-5, f"{kind}: {name}")


def test_what_does_not_fit_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match=r"engine\.router_aux_loss is for mixtures"):
        require_fitting(tiny_config("qwen3"), EngineConfig(kind="megatron", router_aux_loss=0.1))
    run_ranks(refusing_rank, 1, path)


def refusing_rank(layout: Layout, path: Path) -> None:
    engine = make_engine(layout, path, {})
    batch = with_experts(cut(examples(), layout, 5), [e[:, :1] for e in experts_of_others()])
    with pytest.raises(IncompatibleError, match="recorded experts are not those of this model"):
        engine.forward_backward(batch, loss)
    told = with_experts(cut(examples(), layout, 2), experts_of_others())
    first, *others = told.microbatches
    some = replace(told, microbatches=(replace(first, experts=None), *others))
    with pytest.raises(BurnishError, match=r"(?s)experts in 2 of 3 micro-batches, none in the 1\."):
        engine.forward_backward(some, loss)
