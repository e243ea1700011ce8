"""Runs that replay their routers: what the update gets, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny import save_tiny
from support.runs.same_runs import RL as SAME
from support.runs.same_runs import assert_same
from support.runs.training_files import BY_SIGMOID, FRESH, MIXTURE, RL, done, metrics

from burnish.api import run_method
from burnish.config.schema import RunConfig
from burnish.engines.base import LossFn
from burnish.engines.factory import require_fitting
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import BurnishError, UsageError
from burnish.methods.parts.critic import critic_foundation
from burnish.methods.table import METHODS
from burnish.records import Batch, Completion, Request
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.runs.setup import lay_foundation
from burnish.tracking.stats import Stats


def config_of(name: str, replay: str, **settings: Any) -> RunConfig:
    given: dict[str, Any] = {
        **RL,
        "name": name,
        "steps": 2,
        "model": {**RL["model"], "fresh": MIXTURE},
        "batch": {**RL["batch"], "minibatches": 2},
        "algorithm": {"router_replay": replay, "kl": {"coef": 0.1}},
        "evaluation": {"before": False},
        **settings,
    }
    return RunConfig.model_validate(given)


@pytest.mark.parametrize("replay", ["recompute", "rollout"])
@pytest.mark.nightly
@pytest.mark.parametrize("fresh", [MIXTURE, BY_SIGMOID], ids=lambda each: each["model_type"])
def test_old_logprobs_are_exactly_those_of_the_first_update(
    work: Path, monkeypatch: pytest.MonkeyPatch, fresh: dict[str, Any], replay: str
) -> None:
    """The second update's are not, but its tokens still go to the same experts."""
    monkeypatch.chdir(work)
    before: list[bool] = []
    plain = TorchEngine.forward_backward

    def compared(engine: TorchEngine, batch: Batch, loss: LossFn) -> Stats:
        if all(micro.experts is None for micro in batch.microbatches):
            return plain(engine, batch, loss)  # the comparison before the run
        outputs = engine.forward(batch, experts=True)
        same = True
        for micro, output in zip(batch.microbatches, outputs, strict=True):
            assert micro.experts is not None
            assert micro.old_logprobs is not None
            assert torch.equal(output.experts.long(), micro.experts.long())
            same = same and torch.equal(output.logprobs, micro.old_logprobs)
        before.append(same)
        return plain(engine, batch, loss)

    monkeypatch.setattr(TorchEngine, "forward_backward", compared)
    evened = {**RL["engine"], "router_aux_loss": 0.01}
    name = f"{fresh['model_type']}_{replay}"
    model = {**RL["model"], "fresh": fresh}
    run_method(METHODS["rl"], config_of(name, replay, engine=evened, model=model))
    assert before == [True, False] * 2
    row = metrics(work / "runs" / name)[-1]
    assert row["actor/moe/load_imbalance"] >= 1
    assert 1.5 < row["actor/moe/aux_loss"] < 3  # a mean of both updates; 2 is even


class Silent(BuiltinGenerator):
    """A generator that does not say where tokens went."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        return super().generate(requests, replace(sampling, experts=False), watch)


def test_a_generator_that_does_not_say_is_refused(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Silent)
    with pytest.raises(BurnishError, match="router_replay=recompute"):
        run_method(METHODS["rl"], config_of("silent", "rollout"))


def test_a_model_without_routers_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    with pytest.raises(UsageError, match=r"algorithm\.router_replay"):
        run_method(
            METHODS["rl"], config_of("dense", "recompute", model={**RL["model"], "fresh": FRESH})
        )


@pytest.mark.parametrize("dense", [True, False])
def test_the_experts_of_a_critic_are_evened_out_where_it_has_some(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    monkeypatch.chdir(work)
    path = save_tiny(tmp_path / "dense", "qwen3", vocab_size=512) if dense else None
    critic = {"critic": {"path": str(path)}} if path else {}
    evened = {**RL["engine"], "router_aux_loss": 0.01}
    algorithm = {"advantage": "gae"}
    config = config_of("critic", "none", engine=evened, algorithm=algorithm, **critic)
    found = critic_foundation(lay_foundation(config))
    require_fitting(found.hf_config, found.config.engine)
    assert found.config.engine.router_aux_loss == (0.0 if dense else 0.01)


@pytest.mark.nightly
def test_runs_whose_ranks_share_experts_are_those_of_one_process(work: Path) -> None:
    """With a reference and experts that are replayed and evened out; then resumed by one process, and by two that share them."""
    argv = [*SAME, f"model.fresh={json.dumps(MIXTURE)}", "optim.lr=0.002"]
    argv += ["algorithm.router_replay=rollout", "engine.router_aux_loss=0.01", "evaluation.every=1"]
    shared = "engine.expert_parallel=2"
    wanted = done(work, *argv, "name=alone")
    assert_same(done(work, *argv, shared, "name=shared", world=2), wanted)
    done(work, *argv, shared, "name=resumed", "steps=2", world=2)
    done(work, *argv, "engine.expert_parallel=1", "name=resumed", "steps=3")
    assert_same(done(work, *argv, shared, "name=resumed", world=2), wanted)
