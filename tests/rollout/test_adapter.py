"""An adapter in the generator, merged or beside the weights: its log-probs are the engine's, and what travels is what was asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples
from support.models.adapters import EXPERTS, LORA
from support.models.engines import CPU, make_engine
from support.models.generators import DRAWN, GREEDY, differences, make_generator, require_close
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from support.ranks.traffic import Traffic
from torch import Tensor

from burnish.boxes.shards import Publication
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Part
from burnish.errors import MissingError
from burnish.rollout.builtin.forward import FusedForward
from burnish.rollout.builtin.generator import BuiltinGenerator

SOME = LoraConfig(rank=3, alpha=5.0, rslora=True, targets=["q_proj", "v_proj", "up_proj", "o_proj"])
OF_EXPERTS = LoraConfig(rank=3, alpha=5.0, targets=["v_proj", *EXPERTS])
CASES = [
    ("qwen2", LORA, "fp32", "merged"),
    pytest.param("gemma3_text", LORA, "bf16", "merged", marks=pytest.mark.nightly),
    ("qwen3_moe", OF_EXPERTS, "fp32", "merged"),
    ("qwen2", LORA, "fp32", "adapter"),
    pytest.param("qwen2", LORA, "bf16", "adapter", marks=pytest.mark.nightly),
    pytest.param("llama", SOME, "fp32", "adapter", marks=pytest.mark.nightly),
    pytest.param("gemma3_text", LORA, "fp32", "adapter", marks=pytest.mark.nightly),
    ("qwen3_moe", OF_EXPERTS, "fp32", "adapter"),
    pytest.param("qwen3_moe", OF_EXPERTS, "bf16", "adapter", marks=pytest.mark.nightly),
]


def published_as(publish: str, lora: LoraConfig) -> LoraConfig:
    return lora.model_copy(update={"publish": publish})


@pytest.mark.parametrize(("family", "lora", "precision", "publish"), CASES)
def test_its_logprobs_are_those_of_the_engine(
    tmp_path: Path, family: str, lora: LoraConfig, precision: str, publish: str
) -> None:
    path, config = save_tiny(tmp_path / "m", family, torch.float32), tiny_config(family)
    lora = published_as(publish, lora)
    with process_group(CPU, 60) as layout:
        engine = make_engine(layout, path, None, lora=lora, precision=precision)
        generator = make_generator(config, engine.layout, precision, lora)
        generator.load_weights(engine.published(), version=0)
        for sampling in (DRAWN, GREEDY):
            require_close(differences(engine, generator, config, sampling), precision)
        with pytest.raises(AssertionError):
            require_close(differences(engine, generator, config, adapter=False), precision)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [LORA, SOME])
@torch.inference_mode()
def test_fused_products_are_the_modules(lora: LoraConfig, dtype: str) -> None:
    """As many rows as there are slots at one time; transformers' modules, as PEFT has wrapped them, are the oracle."""
    model = make_generator(tiny_config("qwen2"), Layout(), dtype, published_as("adapter", lora))
    held = model._model.module
    generator = torch.Generator().manual_seed(0)
    for parameter in held.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    assert isinstance(model._model.forward, FusedForward)
    rows = torch.randn(7, 32, generator=generator).to(next(held.parameters()).dtype)
    attention = held.base_model.layers[1].self_attn
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    wanted = torch.cat([layer(rows) for layer in layers], 1)
    tolerance = {"fp32": 1e-6, "bf16": 2e-2}[dtype]
    product = model._model.forward.blocks[1].products[0]
    product.refresh()
    found = product(rows)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def held(generator: BuiltinGenerator) -> dict[str, Tensor]:
    model = generator._model.module
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def unread() -> Any:
    raise AssertionError("what does not change is read again")
    yield


def test_the_models_own_weights_come_once_and_stay(tmp_path: Path) -> None:
    path, lora = save_tiny(tmp_path / "m", "qwen3", torch.float32), published_as("adapter", LORA)
    with process_group(CPU, 60) as layout:
        engine = make_engine(layout, path, lora=lora)
        generator = make_generator(tiny_config("qwen3"), engine.layout, "fp32", lora)
        with pytest.raises(MissingError, match="lora_A"):
            generator.load_weights(Publication((), engine.shards(Part.FROZEN)), version=0)
        generator.load_weights(engine.published(), version=0)
        before = held(generator)
        engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
        engine.optim_step(LR)
        generator.load_weights(Publication(engine.published().changing, unread()), version=1)
        after = held(generator)
        assert {name for name in before if not torch.equal(before[name], after[name])} == {
            name for name in before if ".lora_" in name
        }
        require_close(differences(engine, generator, tiny_config("qwen3")), "fp32")


def publish_rank(layout: Layout, cases: list[tuple[str, Path, LoraConfig, dict[str, int]]]) -> Any:
    """By case: shapes of the adapter's tensors, bytes that this rank sent the first time and the second, and collectives of the second."""
    found = []
    for family, path, lora, settings in cases:
        engine = make_engine(layout, path, lora=lora, **settings)
        generator = make_generator(tiny_config(family), engine.layout, "fp32", lora)
        with Traffic(engine.layout) as first:
            generator.load_weights(engine.published(), version=0)
        engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
        engine.optim_step(LR)
        with Traffic(engine.layout) as again:
            generator.load_weights(engine.published(), version=1)
        if lora.publish == "adapter":
            require_close(differences(engine, generator, tiny_config(family)), "fp32")
        sizes = {s.spec.name: s.spec.shape for s in engine.shards(Part.WEIGHTS)}
        found.append((sizes, sent(first), sent(again), len(again.sent)))
    return found


def sent(traffic: Traffic) -> int:
    return sum(size for _, size in traffic.sent)


def test_several_processes_send_each_other_the_adapter_alone(tmp_path: Path) -> None:
    """Under FSDP every element goes to the one other process, once; tensor ranks have some of them already."""
    asked = [
        ("qwen2", "adapter", LORA, {}),
        ("qwen2", "merged", LORA, {}),
        ("llama", "adapter", SOME, {"tensor_parallel": 2}),
        ("mixtral", "adapter", OF_EXPERTS, {"tensor_parallel": 2}),
    ]
    cases = [
        (
            family,
            save_tiny(tmp_path / family, family, torch.float32),
            published_as(how, lora),
            settings,
        )
        for family, how, lora, settings in asked
    ]
    ranks = run_ranks(publish_rank, 2, cases)
    for index, (_, path, lora, settings) in enumerate(cases):
        sizes = ranks[0][index][0] | ranks[1][index][0]
        adapter = 4 * sum(math.prod(shape) for shape in sizes.values())
        first, again, calls = (sum(rank[index][part] for rank in ranks) for part in (1, 2, 3))
        filling = 16 * 2 * len(sizes)
        if lora.publish == "merged":
            assert again > adapter
        elif settings:
            assert 0 < again < adapter + filling
        else:
            assert adapter <= again < adapter + filling
        if lora.publish == "adapter":
            assert first > (path / "model.safetensors").stat().st_size / 2
            assert calls == 2, "no more than one wave, and nothing besides"
