"""Modules that are trained whole beside an adapter are PEFT's `modules_to_save`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, assert_relative, cut, loss, make_examples, train, whole
from contracts.engine import train_by_hand as by_hand
from peft import PeftModel
from support.models.adapters import plain_adapted, saved_name
from support.models.engines import CPU, make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.boxes.box import whole as all_of
from burnish.boxes.shards import Shard, TensorSpec
from burnish.config.constraints import model_problems
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.errors import IncompatibleError
from burnish.families import ModelShape
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.models.loading import SafetensorsSource
from burnish.models.lora.adapter import Adapter, adapter_record, count_trained, first_adapter
from burnish.models.lora.adapter_config import with_adapter
from burnish.models.meta_init import build_on_meta
from burnish.plan.model import PlannedModel

HEAD = "base_model.model.lm_head.weight"
TABLE = "base_model.model.model.embed_tokens.weight"


def lora_with(*modules: str, **more: Any) -> LoraConfig:
    return LoraConfig(rank=4, alpha=6.0, modules_to_save=list(modules), **more)


def train_rank(layout: Layout, path: Path, lora: LoraConfig, changes: Any) -> dict[str, Any]:
    engine = make_engine(layout, path, lora=lora, **changes)
    found = train(engine, make_examples(VOCAB), 2)
    published = [(s.spec.name, s.box, s.part(s.box).clone()) for s in engine.published().changing]
    shapes = {s.spec.name: s.spec.shape for s in engine.published().changing}
    return found | {"published": published, "shapes": found["shapes"] | shapes}


@pytest.mark.parametrize(
    ("family", "modules", "world", "changes"),
    [
        ("llama", ["lm_head"], 2, {}),
        ("qwen2", ["embed_tokens", "norm"], 1, {"activation_checkpointing": "full"}),
        pytest.param("llama", ["embed_tokens"], 2, {}, marks=pytest.mark.nightly),
        pytest.param("qwen3", ["lm_head"], 2, {"sequence_parallel": 2}, marks=pytest.mark.nightly),
        pytest.param("gemma3_text", ["lm_head"], 4, {"replicas": 2}, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", ["mlp.gate", "lm_head"], 2, {}, marks=pytest.mark.nightly),
    ],
)
def test_they_train_as_peft_on_plain_transformers_does(
    tmp_path: Path, family: str, modules: list[str], world: int, changes: dict[str, Any]
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    lora = lora_with(*modules, targets=["q_proj", "v_proj"])
    plain = plain_adapted(path, lora)
    wanted = by_hand(plain, make_examples(VOCAB))
    if world > 1:
        ranks = run_ranks(train_rank, world, path, lora, changes)
    else:
        with process_group(CPU, 60) as layout:
            ranks = [train_rank(layout, path, lora, changes)]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    found = together(ranks, "weights") | together(ranks, "slots")
    expected = {saved_name(n): t for n, t in (wanted["weights"] | wanted["slots"]).items()}
    if AutoConfig.from_pretrained(path).tie_word_embeddings:  # PEFT's file has both names
        assert torch.equal(found[HEAD], found[TABLE])
        expected |= {n.replace(TABLE, HEAD): t for n, t in expected.items() if TABLE in n}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_relative(found[name], tensor, 5e-5, name)
    merged = plain.merge_and_unload().state_dict()
    published = together(ranks, "published")
    if family == "qwen3_moe":  # whose experts have other names in a file
        published = {name: tensor for name, tensor in published.items() if name in merged}
        assert "model.layers.0.mlp.gate.weight" in published
    for name, tensor in published.items():
        assert_relative(tensor, merged[name], 2e-5, name)


def together(ranks: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    shapes = {name: shape for rank in ranks for name, shape in rank["shapes"].items()}
    built = whole([rank[key] for rank in ranks], shapes)
    held = {name for rank in ranks for name, _, _ in rank[key]}
    return {name: tensor for name, tensor in built.items() if name in held}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_without_the_adapter_it_is_the_model(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    with process_group(CPU, 60) as layout:
        engine = make_engine(layout, path, lora=lora_with("lm_head"))
        batch = cut(make_examples(VOCAB), layout, 2)
        engine.forward_backward(batch, loss)
        engine.optim_step(LR)
        plain = make_engine(layout, path, None).forward(batch)
        off, on = engine.forward(batch, adapter=False), engine.forward(batch)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(off, plain, strict=True))
    assert not torch.equal(on[0].logprobs, off[0].logprobs)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_begins_as_its_module_and_goes_on_from_pefts_file(
    tmp_path: Path, tied: bool
) -> None:
    path = save_tiny(tmp_path / "m", "qwen2" if tied else "llama", torch.float32)
    hf_config, base = AutoConfig.from_pretrained(path), SafetensorsSource(path)
    lora = lora_with("lm_head")
    model = ModelConfig(path=str(path), lora=lora)
    record = adapter_record(model, hf_config)
    begun = first_adapter(model, hf_config, record, 0, base)
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert torch.equal(filled(begun, hf_config, lora)[HEAD], state["lm_head.weight"])
    plain = plain_adapted(path, lora)
    plain.save_pretrained(tmp_path / "adapter")
    start = ModelConfig(path=str(path), lora=LoraConfig(path=str(tmp_path / "adapter")))
    described = tmp_path / "adapter" / ADAPTER_CONFIG
    start = with_adapter(start, described.read_bytes())
    source = first_adapter(start, hf_config, adapter_record(start, hf_config), 0, base)
    found = filled(source, hf_config, start.lora)
    assert (TABLE in found) == tied
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path / "adapter"
    )
    assert torch.equal(found[HEAD], again.base_model.model.lm_head.weight)
    beside = start.model_copy(
        update={"lora": LoraConfig(path=str(tmp_path / "adapter"), publish="adapter")}
    )
    with pytest.raises(IncompatibleError, match="publish"):
        with_adapter(beside, described.read_bytes())
    if tied:
        fields = json.loads(described.read_text())
        described.write_text(json.dumps(fields | {"ensure_weight_tying": False}))
        with pytest.raises(IncompatibleError, match="ensure_weight_tying"):
            first_adapter(start, hf_config, adapter_record(start, hf_config), 0, base)


def filled(source: Any, hf_config: Any, lora: LoraConfig) -> dict[str, Tensor]:
    shards = [
        Shard(TensorSpec(r.name, r.shape, torch.float32), all_of(r.shape), torch.empty(r.shape))
        for r in Adapter(build_on_meta(hf_config), lora).weights
    ]
    source.fill(shards)
    return {shard.spec.name: shard.tensor for shard in shards}


@pytest.mark.parametrize("modules", [["nothing"], ["mlp"], ["self_attn", "lm_head"]])
def test_what_is_no_layer_of_the_model_is_refused(modules: list[str]) -> None:
    with pytest.raises(IncompatibleError, match="modules_to_save"):
        Adapter(build_on_meta(tiny_config("llama")), lora_with(*modules))


def test_a_layer_is_adapted_or_trained_whole() -> None:
    names = {
        r.name for r in Adapter(build_on_meta(tiny_config("llama")), lora_with("k_proj")).weights
    }
    of_keys = {name.rpartition("k_proj")[2] for name in names if "k_proj" in name}
    assert of_keys == {".weight"}
    assert any("q_proj.lora_A" in name for name in names)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["norm", "lm_head"]])
def test_the_planner_counts_them(modules: list[str], tied: bool) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied)
    lora = lora_with(*modules)
    model = build_on_meta(config)
    held = {r.parameter: r.shape for r in Adapter(model, lora).weights}
    planned = PlannedModel(ModelShape.of(config.to_dict()), lora)
    counted = sum(model.get_parameter(name).numel() for name in held)
    assert planned.adapter == count_trained(config, lora) == counted


def test_an_adapter_is_needed() -> None:
    alone = ModelConfig(path="m", lora=LoraConfig(modules_to_save=["lm_head"]))
    assert len(list(model_problems(alone))) == 1
    assert not list(model_problems(ModelConfig(path="m", lora=lora_with("lm_head"))))
