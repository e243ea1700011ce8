from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.models.adapters import EXPERTS, LORA, RandomAdapter, plain_adapted
from support.models.tiny import FAMILIES, MIXTURES, VOCAB, save_tiny, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, UsageError, install
from burnish.files.safetensors import ADAPTER_PREFIX, model_digest
from burnish.models.lora.adapter import (
    Adapter,
    FreshAdapter,
    adapter_record,
    target_weights,
    warn_of_unadapted,
)
from burnish.models.lora.adapter_config import save_adapter_config
from burnish.models.meta_init import build_on_meta
from burnish.models.names import model_shards, regions


@pytest.mark.parametrize("family", sorted(set(FAMILIES).difference(MIXTURES)))
def test_names_are_those_of_the_model_and_of_pefts_files(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    model = build_on_meta(tiny_config(family))
    plain = [(region.name, region.shape) for region in regions(model)]
    adapter = Adapter(model, LORA, torch.bfloat16)
    assert [(region.name, region.shape) for region in adapter.base] == plain
    plain_adapted(path).save_pretrained(tmp_path / "adapter")

    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    found = {region.name: region.shape for region in adapter.weights}
    assert found == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert all(name.startswith(ADAPTER_PREFIX) for name in found)
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_only_the_layers_that_are_asked_for() -> None:
    model = build_on_meta(tiny_config("qwen3"))
    adapter = Adapter(model, LoraConfig(rank=2, targets=["k_proj", "up_proj"]))
    layers = {r.name.removeprefix(ADAPTER_PREFIX).partition(".lora_")[0] for r in adapter.weights}
    assert layers == {
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.k_proj", "mlp.up_proj")
    }


def test_layers_that_there_are_not() -> None:
    model = build_on_meta(tiny_config("qwen3"))
    with pytest.raises(IncompatibleError, match="lm_head") as caught:
        Adapter(model, LoraConfig(rank=2, targets=["q", "v_proj", "lm_head"]))
    assert caught.value.have == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert "model.lora.targets" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "targets", "unknown"),
    [
        ("mixtral", ["q_proj", "w1", "w2"], "w1, w2"),
        ("qwen3_moe", ["gate_up_proj"], "gate_up_proj"),
        ("qwen3", ["experts.down_proj"], r"experts\.down_proj"),
    ],
)
def test_experts_go_by_the_names_that_peft_has_for_them(
    family: str, targets: list[str], unknown: str
) -> None:
    model = build_on_meta(tiny_config(family))
    with pytest.raises(IncompatibleError, match=str(unknown)) as caught:
        Adapter(model, LoraConfig(rank=2, targets=targets))
    fused = ", experts.down_proj, experts.gate_up_proj"
    assert str(caught.value.have).endswith(fused) == (family != "qwen3")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("targets", [EXPERTS, ["k_proj", "experts.down_proj"]])
def test_peft_saves_and_loads_adapters_of_experts_as_they_are_here(
    tmp_path: Path, family: str, targets: list[str]
) -> None:
    """Names and shapes are those of PEFT's file; what is written here, PEFT loads, and computes the same with."""
    path = save_tiny(tmp_path / "m", family, torch.float32)
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    wanted = plain_adapted(path, lora)
    wanted.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs/adapter_model.safetensors")

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    adapter = Adapter(model, lora)
    shards = list(model_shards(model, parts=adapter.weights))
    assert {s.spec.name: s.spec.shape for s in shards} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    RandomAdapter().fill(shards)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(model(ids).logits, wanted(ids).logits, rtol=1e-5, atol=1e-6)

    record = record_of(path, **lora.model_dump(include={"rank", "targets"}))
    save_adapter_config(record, tmp_path / "adapter")
    tensors = {s.spec.name: s.tensor.detach() for s in shards}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_attention_beside_experts_is_adapted(family: str) -> None:
    config = tiny_config(family)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    made = Adapter(build_on_meta(config), LoraConfig(rank=2, targets=targets))
    assert len(made.weights) == 2 * 4 * config.num_hidden_layers


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError) as caught:
        Adapter(build_on_meta(tiny_config("qwen3")), LORA)
    assert caught.value.do == install("lora")


def test_experts_are_not_adapted_by_mistake() -> None:
    """In this family down_proj names a dense layer and, to PEFT, the fused experts as well."""
    mixed = tiny_config("qwen3_moe")
    named = LORA.model_copy(update={"targets": ["q_proj", "down_proj"]})
    with pytest.raises(IncompatibleError):
        Adapter(build_on_meta(mixed), named)
    by_default = Adapter(build_on_meta(mixed), LORA)
    assert len(by_default.weights) == 2 * 4 * mixed.num_hidden_layers
    dense = tiny_config("qwen3_moe", mlp_only_layers=[])
    assert len(Adapter(build_on_meta(dense), LORA).weights) == 2 * 4 * dense.num_hidden_layers


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("qwen3", []),
        ("qwen3_moe", ["down_proj", "gate_proj", "up_proj"]),
        ("qwen3_next", ["down_proj", "gate_proj", "up_proj"]),
        ("mamba2", ["out_proj"]),
        ("nemotron_h", ["out_proj"]),
    ],
)
def test_layers_that_peft_cannot_adapt_are_left_out_and_named(
    family: str, left_out: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(family)
    warn_of_unadapted(LORA, config)
    assert all(name in caplog.text for name in left_out)
    assert bool(caplog.records) == bool(left_out)
    adapter = Adapter(build_on_meta(config), LORA)
    adapted = {change.layer.rpartition(".")[2] for change in adapter.changes.values()}
    assert not adapted & set(left_out)
    assert adapted


@pytest.mark.parametrize("targets", [[], ["k_proj"]])
def test_a_rank_above_the_shorter_side_of_a_matrix_is_warned_of(
    targets: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("llama")
    model = build_on_meta(config)
    Adapter(model, LoraConfig(rank=1, targets=targets))
    adapted: list[Any] = [each for each in model.modules() if hasattr(each, "lora_A")]
    most = min(min(layer.in_features, layer.out_features) for layer in adapted)
    warn_of_unadapted(LoraConfig(rank=most, targets=targets), config)
    assert not caplog.records
    warn_of_unadapted(LoraConfig(rank=most + 1, targets=targets), config)
    (record,) = caplog.records
    assert "model.lora.rank" in record.getMessage()
    assert "k_proj" in record.getMessage()


def test_transposed_layers_are_merged_as_peft_does() -> None:
    """GPT-2 keeps Wᵀ."""
    config = AutoConfig.for_model("gpt2", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    adapter = Adapter(model, LoraConfig(rank=2, alpha=3.0))
    with torch.no_grad():
        for shard in model_shards(model, parts=adapter.weights):
            shard.tensor.normal_()
    merged = {each.spec.name: each.part(each.box) for each in adapter.merged(Layout())}
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        layer: Any = model.get_submodule(f"transformer.h.0.{name}")
        layer.merge()
        ours = merged[f"transformer.h.0.{name}.weight"]
        torch.testing.assert_close(ours, layer.base_layer.weight.detach())


def test_first_values_are_pefts_kind_and_depend_on_the_name_alone() -> None:
    model = tiny_model("qwen3", hidden_size=256)
    adapter = Adapter(model, LORA)
    shards = list(model_shards(model, parts=adapter.weights))
    FreshAdapter(3).fill(shards)
    for shard in shards:
        bound = 1 / math.sqrt(shard.spec.shape[1])  # Kaiming's with a = √5
        zero = ".lora_B." in shard.spec.name
        assert float(shard.tensor.abs().max()) <= (0 if zero else bound)
        assert zero or float(shard.tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
    whole_tensor = next(s for s in shards if ".lora_A." in s.spec.name)
    inner = Box((1, 5), (2, 7))
    piece = Shard(whole_tensor.spec, inner, torch.empty(inner.sizes))
    FreshAdapter(3).fill([piece])
    assert torch.equal(piece.tensor, whole_tensor.tensor[1:3, 5:12])
    FreshAdapter(4).fill([piece])
    assert not torch.equal(piece.tensor, whole_tensor.tensor[1:3, 5:12])


def record_of(path: Path, **lora: object) -> dict[str, Any]:
    model = ModelConfig.model_validate(
        {"path": str(path), "lora": {"rank": 4, "alpha": 6.0, **lora}}
    )
    return adapter_record(model, AutoConfig.from_pretrained(path))


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_what_the_record_describes(tmp_path: Path, rslora: bool) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    lora = LoraConfig(rank=4, alpha=6.0, rslora=rslora)
    model = build_on_meta(tiny_config("qwen3"))
    shards = [
        Shard(TensorSpec(r.name, r.shape, torch.float32), whole(r.shape), torch.empty(r.shape))
        for r in Adapter(model, lora).weights
    ]
    RandomAdapter().fill(shards)
    save_adapter_config(record_of(path, rslora=rslora), tmp_path / "adapter")

    save_file(
        {s.spec.name: s.tensor for s in shards}, tmp_path / "adapter/adapter_model.safetensors"
    )
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.arange(3, 20)[None]
    assert torch.equal(loaded(ids).logits, plain_adapted(path, lora)(ids).logits)
    described = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(path)
    url = "s3://models/tiny"
    model = ModelConfig.model_validate({"path": str(path), "lora": {"rank": 4}})
    record = adapter_record(model, AutoConfig.from_pretrained(path), url)
    assert (record["base"], record["base_digest"]) == (url, model_digest(path))
    assert described["target_modules"] == sorted(described["target_modules"])


def test_a_digest_tells_models_of_one_shape_apart(tmp_path: Path) -> None:
    first = save_tiny(tmp_path / "a", "qwen3")
    again = save_tiny(tmp_path / "b", "qwen3")
    other = tiny_model("qwen3", seed=1)
    other.to(torch.bfloat16).save_pretrained(tmp_path / "c")
    assert model_digest(first) == model_digest(again) != model_digest(tmp_path / "c")
    config = again / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert model_digest(first) != model_digest(again)


def test_layers_that_peft_would_not_find_again_get_no_adapter():
    """transformers renames Laguna's shared experts in the names of an adapter, too."""
    model = build_on_meta(AutoConfig.for_model("laguna"))
    kinds = {name.split(".")[-2] for name in target_weights(model, LoraConfig(rank=2))}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "g_proj"}
    with pytest.raises(IncompatibleError, match=r"shared_experts.*\n.*\n.*up_proj"):
        target_weights(model, LoraConfig(rank=2, targets=["q_proj", "up_proj"]))
