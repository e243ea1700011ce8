"""The guard lets honest generators pass, and names the tensor of one that does not hold what was published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.checkpoints.states import committed
from support.models.engines import CPU, make_engine
from support.models.generators import make_generator
from support.models.tiny import VOCAB, save_tiny
from support.nightly import by_day
from support.ranks.processes import run_ranks
from support.runs.training_files import FRESH, RL
from torch import Tensor, nn
from transformers import AutoConfig

from burnish.api import run_method
from burnish.boxes.shards import Publication
from burnish.config.schema import LoraConfig, RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Part
from burnish.errors import BurnishError
from burnish.methods.parts.guard import Guard
from burnish.methods.parts.policy_update import PolicyUpdate
from burnish.methods.table import METHODS
from burnish.models.meta_init import count_flops
from burnish.records import Completion, Prompt, Request
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.generator import BuiltinGenerator

LIMIT = 1e-5
"""In fp32 rounding explains less."""
Fault = Callable[[BuiltinGenerator, Mapping[str, Tensor]], None]
"""Spoils a generator that was given new weights, from those before."""


def tensors(generator: BuiltinGenerator) -> dict[str, Tensor]:
    return {shard.spec.name: shard.tensor for shard in generator._model.shards()}


def drop(name: str) -> Fault:
    def fault(generator: BuiltinGenerator, before: Mapping[str, Tensor]) -> None:
        tensors(generator)[name].copy_(before[name])

    return fault


def transpose(name: str) -> Fault:
    def fault(generator: BuiltinGenerator, before: Mapping[str, Tensor]) -> None:
        tensor = tensors(generator)[name]
        tensor.copy_(tensor.T.clone())

    return fault


def keep_head(generator: BuiltinGenerator, before: Mapping[str, Tensor]) -> None:
    head: Any = generator._model.module.get_output_embeddings()
    head.weight = nn.Parameter(before["model.embed_tokens.weight"].clone(), requires_grad=False)


def compute_otherwise(generator: BuiltinGenerator, before: Mapping[str, Tensor]) -> None:
    """The head's own product is at twice its scale."""
    logits = generator._model.logits
    vars(generator._model)["logits"] = lambda hidden: 2 * logits(hidden)


GATE = "model.layers.1.mlp.gate_proj.weight"
FAULTS: dict[str, tuple[str, Fault, str | None]] = {
    "a dropped matrix": ("qwen3", drop(GATE), GATE),
    "a dropped norm": ("qwen3", drop("model.norm.weight"), "model.norm.weight"),
    "a dropped expert": (
        "mixtral",
        drop("model.layers.0.block_sparse_moe.experts.1.w2.weight"),
        "model.layers.0.block_sparse_moe.experts.1.w2.weight",
    ),
    "a transposed matrix": ("qwen3", transpose(GATE), GATE),
    "a stale tied head": ("qwen3", keep_head, "model.embed_tokens.weight"),
    "another formula": ("qwen3", compute_otherwise, None),
}


def checked(
    layout: Layout,
    path: str,
    fault: Fault | None = None,
    spoilt: int = 0,
    lora: LoraConfig | None = None,
    limit: float | Literal["auto"] = LIMIT,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> str:
    """Publish twice to a generator, which on rank `spoilt` has a fault the second time; what the guard says of that."""
    engine = make_engine(layout, Path(path), lora=lora)
    config = AutoConfig.from_pretrained(path)
    generator = make_generator(config, layout, lora=lora)
    rollout = {"max_disagreement": limit, "check_every": 2, "max_response_length": 8}
    rollout |= {"temperature": 0.7, "top_k": 30}
    settings = RunConfig.model_validate({"rollout": rollout, "engine": {"precision": precision}})
    update = PolicyUpdate(engine, None, None, count_flops(config), settings, None)
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, rng.integers(3, VOCAB, 3 + i), "", None, None, "", {}) for i in range(3)]
    guard = Guard(update, generator, prompts, layout, first=0)
    generator.load_weights(engine.published(), 0)
    guard.check(0)
    before = {name: tensor.clone() for name, tensor in tensors(generator).items()}
    for shard in engine.shards(Part.WEIGHTS):
        shard.tensor.detach().mul_(1.25)
    generator.load_weights(engine.published(), 1)
    if fault is not None and layout.rank == spoilt:
        fault(generator, before)
    guard.check(1)  # not due
    try:
        guard.check(2)
    except BurnishError as error:
        return str(error)
    return ""


def model(directory: Path, family: str) -> str:
    return str(save_tiny(directory / family, family, torch.float32, intermediate_size=32))


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_planted_is_named(tmp_path: Path, what: str) -> None:
    family, fault, name = FAULTS[what]
    with process_group(CPU, 60) as layout:
        said = checked(layout, model(tmp_path, family), fault)
    assert "rollout.max_disagreement" in said
    names = {word.strip("(),;.") for word in said.split() if word.startswith("model.")}
    assert names == ({name} if name else set())


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma3_text"])
def test_an_honest_generator_passes(tmp_path: Path, family: str) -> None:
    with process_group(CPU, 60) as layout:
        assert checked(layout, model(tmp_path, family)) == ""


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_an_adapter_passes_merged_and_beside(tmp_path: Path, publish: str) -> None:
    lora = LoraConfig(rank=4, publish=publish)
    with process_group(CPU, 60) as layout:
        assert checked(layout, model(tmp_path, "qwen3"), lora=lora) == ""


def shift(token: int, nats: float) -> Fault:
    """Make one log-prob of the second completion wrong, as a formula of rare states would."""

    def fault(generator: BuiltinGenerator, _: Mapping[str, Tensor]) -> None:
        right = generator._logprobs

        def wrong(sequence: Any) -> Any:
            sampled, plain = right(sequence)
            plain[token] += nats if len(sequence.prompt.token_ids) == 4 else 0.0
            return sampled, plain

        vars(generator)["_logprobs"] = wrong

    return fault


@pytest.mark.parametrize(
    ("nats", "precision", "stops", "is_named"),
    [
        (0.2, "fp32", True, True),
        (-0.2, "fp32", True, True),
        (0.08, "fp32", False, False),
        (0.67, "bf16", False, True),
        (0.3, "bf16", False, False),
    ],
    ids=str,
)
def test_a_wrong_token_is_seen_where_the_mean_is_small(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    nats: float,
    precision: Literal["fp32", "bf16"],
    stops: bool,
    is_named: bool,
) -> None:
    """Of 32 tokens. In bf16, rounding may route a token to another expert."""
    path = model(tmp_path, "qwen3")
    with process_group(CPU, 60) as layout, caplog.at_level("WARNING"):
        said = checked(layout, path, shift(5, nats), limit="auto", precision=precision)
    assert bool(said) == stops
    assert ("token 6 of completion 2" in said + caplog.text) == is_named


def on_ranks(layout: Layout, path: str, spoilt: int) -> str:
    return checked(layout, path, FAULTS["a dropped matrix"][1], spoilt)


@pytest.mark.parametrize("spoilt", [1, 9])
def test_every_rank_hears_of_the_fault_of_one(tmp_path: Path, spoilt: int) -> None:
    first, second = run_ranks(on_ranks, 2, model(tmp_path, "qwen3"), spoilt)
    assert (GATE in first, GATE in second) == ((True, True) if spoilt == 1 else (False, False))
    assert bool(first) == bool(second) == (spoilt == 1)


class Stale(BuiltinGenerator):
    """A generator whose tied head stays as it was at first."""

    def load_weights(self, weights: Publication, version: int) -> None:
        super().load_weights(weights, version)
        if version == 0:
            keep_head(self, tensors(self))


def settings_of(name: str, **rollout: Any) -> RunConfig:
    fresh = {**FRESH, "initializer_range": 0.3}
    common = {**RL, "name": name, "model": {**RL["model"], "fresh": fresh}, "steps": 4}
    given = {**RL["rollout"], "check_every": 2, **rollout}
    quiet = {"data": {**RL["data"], "validation": []}, "evaluation": {}}
    return RunConfig.model_validate({**common, **quiet, "rollout": given})


@pytest.mark.nightly
def test_a_run_stops_before_it_trains_on_what_a_stale_head_draws(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    run_method(METHODS["rl"], settings_of("honest"))
    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Stale)
    with pytest.raises(BurnishError, match=r"model\.embed_tokens\.weight"):
        run_method(METHODS["rl"], settings_of("stale", check_every=1))
    assert committed(work / "runs/stale/checkpoints") == []


@pytest.mark.parametrize(
    ("limit", "wanted"), by_day([(None, 0), ("auto", 3), (0.5, 3)], [("auto", 3)])
)
def test_it_compares_at_the_start_and_every_so_often(
    work: Path, monkeypatch: pytest.MonkeyPatch, limit: str | float | None, wanted: int
) -> None:
    """By the seed of its draws, which is not that of training."""
    monkeypatch.chdir(work)
    checks: list[int] = []

    class Noting(BuiltinGenerator):
        def generate(
            self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
        ) -> list[list[Completion]]:
            if sampling.seed:
                checks.append(sum(request.samples for request in requests))
            return super().generate(requests, sampling, watch)

    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Noting)
    run_method(METHODS["rl"], settings_of(f"noting_{limit}", max_disagreement=limit))
    assert checks == [4] * wanted
