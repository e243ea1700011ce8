import re

import pytest
import torch
from support.models.tiny import FAMILIES as TINY
from support.models.tiny import tiny_config
from transformers import AutoConfig

from burnish.config.schema import LoraConfig
from burnish.engines.torch.tensor_parallel import _layer_cuts, _layer_plan
from burnish.errors import IncompatibleError, UsageError
from burnish.families import FAMILIES, ModelShape
from burnish.models.lora.adapter import Adapter
from burnish.models.lora.quantized_base import quantize_layers
from burnish.models.meta_init import build_on_meta, count_flops
from burnish.plan.model import PlannedModel, held

LEAST = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def planned(fields, lora=None):
    return PlannedModel(ModelShape.of(fields), lora)


def elements(config):
    return sum(parameter.numel() for parameter in build_on_meta(config).parameters())


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_operations_are_those_of_the_built_model(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    shape = planned(config.to_dict())
    assert shape.elements == elements(config)
    assert shape.shape.depth == config.num_hidden_layers
    counted = count_flops(config)
    for lengths in ([23], [5, 9, 100]):
        assert shape.flops.forward(lengths) == counted.forward(lengths)


@pytest.mark.parametrize("family", TINY)
def test_an_adapter_may_be_for_what_the_built_model_has(family):
    """Were a name missing here, a plan would refuse what can be trained."""
    config = tiny_config(family)

    def adapter(*targets):
        return planned(config.to_dict(), LoraConfig(rank=2, targets=list(targets))).adapter

    with pytest.raises(IncompatibleError) as refused:
        Adapter(build_on_meta(config), LoraConfig(rank=2, targets=["nothing"]))
    kinds = re.search("have: (.*)", str(refused.value))[1].split(", ")
    assert all(adapter(kind) for kind in kinds)
    with pytest.raises(IncompatibleError, match="lm_head"):
        planned(
            config.to_dict(), LoraConfig(rank=2, targets=["q_proj", "lm_head"])
        ).require_targets()


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(
    "family", sorted(name for name, each in FAMILIES.items() if each.cuts_heads)
)
def test_tensor_ranks_have_of_an_adapter_what_the_engine_leaves_them(family, experts):
    config = tiny_config(family)
    family, model = FAMILIES[family], build_on_meta(config)
    if experts and not family.has_router:
        pytest.skip("no experts")
    mlp = [] if family.has_router else ["up_proj", "down_proj"]
    mlp = ["experts.gate_up_proj", "experts.down_proj"] if experts else mlp
    lora = LoraConfig(rank=2, targets=["q_proj", "v_proj", "o_proj", *mlp])
    factors = {region.parameter for region in Adapter(model, lora).weights}
    cuts = dict(_layer_cuts(model, _layer_plan(config), 0, 2))
    found = sum(
        parameter.numel() // (2 if name in cuts else 1)
        for name, parameter in model.named_parameters()
        if name in factors
    )
    shape = planned(config.to_dict(), lora)
    assert found < shape.adapter
    counts = shape.shape.counts
    assert found == sum(held(each, 1, 2) * counts[kind] for kind, each in shape.trained.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_in_four_bits_has_the_sizes_of_the_engines_layers(dtype):
    """Layers with 96 inputs stay as they are."""
    config = tiny_config("qwen2", hidden_size=64, intermediate_size=96, head_dim=16)
    lora = LoraConfig(rank=2, targets=["q_proj"], quantize_base="nf4")
    model = build_on_meta(config)
    Adapter(model, lora, dtype)
    quantize_layers(model, config, lora)
    kept = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    shape = planned(config.to_dict(), lora)
    stored = shape.total(shape.stored(dtype.itemsize)) + sum(w.elements for w in shape.root)
    assert stored == kept < shape.elements


@pytest.mark.parametrize("family", TINY)
def test_fields_that_are_not_given_have_the_defaults_of_transformers(family):
    tiny = tiny_config("llama").to_dict()
    given = {name: tiny[name] for name in LEAST} | {"num_key_value_heads": 2}
    if family == "qwen3_moe":
        given |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    if family == "mixtral":
        given |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **given)
    assert planned({"model_type": family, **given}).elements == elements(config)


def test_the_language_model_of_a_larger_configuration():
    text = {**tiny_config("qwen3").to_dict(), "model_type": "qwen3"}
    assert ModelShape.of({"model_type": "other", "text_config": text}) == ModelShape.of(text)


def test_what_is_not_known_is_refused_by_name():
    with pytest.raises(UsageError):
        planned({"model_type": "mamba"})
    with pytest.raises(UsageError, match="hidden_size"):
        planned({"model_type": "llama", "num_hidden_layers": 2})


def test_rows_are_cut_as_torch_cuts_them():
    (embedding, *_) = planned(tiny_config("llama").to_dict()).root
    assert embedding.held(1, 1) == 97 * 32
    assert embedding.held(4, 1) == 25 * 32  # ceil(97 / 4) rows
    assert embedding.held(1000, 1) == 32


@pytest.mark.parametrize("family", TINY)
def test_key_heads_that_are_not_given_are_those_of_transformers(family):
    given = {name: tiny_config("llama").to_dict()[name] for name in LEAST}
    given |= {"hidden_size": 64, "num_attention_heads": 16}
    if FAMILIES[family].has_router:
        given |= {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
        given["moe_intermediate_size"] = given["intermediate_size"]
    config = AutoConfig.for_model(family, **given)
    assert planned(given | {"model_type": family}).elements == elements(config)


@pytest.mark.parametrize(
    ("family", "biases"),
    [("llama", ["attention_bias", "mlp_bias"]), ("qwen3", ["attention_bias"]), ("qwen2", [])],
)
def test_biases_are_counted(family, biases):
    config = tiny_config(family, **dict.fromkeys(biases, True))
    assert planned(config.to_dict()).elements == elements(config)


@pytest.mark.parametrize(
    "wrong", [{"num_hidden_layers": 0}, {"hidden_size": -64}, {"layer_types": ["full_attention"]}]
)
def test_sizes_that_no_model_has_are_refused(wrong):
    fields = tiny_config("qwen2", num_hidden_layers=2, sliding_window=8).to_dict() | {
        "sliding_window": 8
    }
    with pytest.raises(UsageError, match="|".join(wrong)):
        planned(fields | wrong)
