"""What the Megatron engine's processes hold of every type of model and of adapters, beside the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.models.tiny import tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig, RunConfig
from burnish.distributed.layout import Layout
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.families import FAMILIES
from burnish.methods.table import METHODS
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner
from burnish.plan.shapes import model_shape

TYPES = sorted(name for name, each in FAMILIES.items() if each.on_megatron)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "experts": {"expert_parallel": 2},
}
EXPERTS = LoraConfig(rank=4, targets=["o_proj", "experts.gate_up_proj", "experts.down_proj"])
Case = tuple[str, dict[str, Any], LoraConfig | None]


def config_of(kind: str) -> PretrainedConfig:
    """A tiny model with a vocabulary that two ranks divide."""
    return tiny_config(kind, vocab_size=96)


def slots_of(part: Any) -> Iterator[Tensor]:
    for state in part.optimizer.state.values():
        yield from (slot for slot in state.values() if isinstance(slot, Tensor))


def held_rank(layout: Layout, cases: Sequence[Case]) -> list[tuple[int, int, int]]:
    """Bytes of weights, gradients and the optimizer of each case in this process."""
    found = []
    for kind, settings, lora in cases:
        config = EngineConfig(kind="megatron", precision="bf16", **settings)
        device = torch.device("cpu")
        hf = config_of(kind)
        engine = MegatronEngine(hf, config, OptimConfig(), layout=layout, device=device, lora=lora)
        weights = [weight for chunk in engine._chunks for weight in chunk.parameters()]
        assert engine._optimizer is not None
        gradients = [weight.main_grad for weight in weights if weight.requires_grad]
        state = [slot for part in engine._optimizer.parts for slot in slots_of(part)]
        if lora is None:  # the exact weights of an adapter are the weights
            state += [each for part in engine._optimizer.parts for each in part.get_parameters()]
        found.append(tuple(sum(x.nbytes for x in some) for some in (weights, gradients, state)))
        engine.close()
    return found


def planned(kind: str, settings: dict[str, Any], lora: LoraConfig | None) -> dict[str, float]:
    fields = config_of(kind).to_dict()
    values: dict[str, Any] = {
        "model": {"fresh": fields, "tokenizer": "t"},
        "data": {"train": ["t.jsonl"], "max_length": 16},
        "batch": {"examples": 2, "tokens_per_device": 16},
        "engine": {"kind": "megatron", "precision": "bf16", **settings},
    }
    if lora is not None:
        values["model"]["lora"] = lora.model_dump()
    shape = model_shape(fields, "megatron")
    config = RunConfig.model_validate(values)
    plan, refused = Planner(
        shape, config, METHODS["sft"], parse_devices("2xCPU-24G")
    ).as_configured()
    assert plan is not None, refused
    return plan.phases["save"]


def cases_of(kind: str) -> list[Case]:
    routed = FAMILIES[kind].has_router
    adapters: list[LoraConfig | None] = [None, LoraConfig(rank=4)]
    adapters += [EXPERTS] if routed and not FAMILIES[kind].stacks_experts else []
    layouts = [each for name, each in LAYOUTS.items() if routed or name != "experts"]
    return [(kind, layout, lora) for layout in layouts for lora in adapters]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", TYPES)
def test_state_is_what_the_engine_holds(kind: str) -> None:
    cases = cases_of(kind)
    wrong = []
    for case, *held in zip(cases, *run_ranks(held_rank, 2, cases), strict=True):
        parts = planned(*case)
        fullest = [max(numbers) for numbers in zip(*held, strict=True)]
        wanted = [parts[name] for name in ("weights", "gradients", "optimizer")]
        # Only the last stage has the last norm, and Megatron fills up the parts of its buffers.
        near = [
            pytest.approx(size, rel=0.005, abs=slack)
            for size, slack in zip(fullest, (0, 0, 1024), strict=True)
        ]
        if wanted != near:
            wrong.append((case, wanted, fullest))
    assert not wrong
