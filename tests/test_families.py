from collections import Counter

import pytest
from support.models.tiny import FAMILIES as TINY
from support.models.tiny import tiny_config

from burnish.families import FAMILIES, ModelShape, family_of, names_of
from burnish.models.meta_init import build_on_meta, count_flops


def test_the_table_has_exactly_the_families_that_tests_train():
    assert {name for name, family in FAMILIES.items() if family.described} == set(TINY)
    assert not family_of("a type of tomorrow").described
    assert not family_of("a type of tomorrow").on_megatron
    mixtures = {name for name, family in FAMILIES.items() if family.has_router}
    assert mixtures == set(names_of("has_router").split(", "))
    by_sigmoid = {name for name, family in FAMILIES.items() if family.scores_by_sigmoid}
    assert by_sigmoid | {"ernie4_5_moe"} == set(names_of("router_bias").split(", "))
    assert mixtures - by_sigmoid == {
        "mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text",
        "deepseek_v2", "flex_olmo", "hunyuan_v1_moe", "ernie4_5_moe",
    }  # fmt: skip


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True, "attention_bias": True}, {"mlp_bias": True}],
    ids=["plain", "tied", "mlp_bias"],
)
def test_every_parameter_has_the_shape_that_transformers_gives_it(family, changes):
    config = tiny_config(family, **changes)
    shape = ModelShape.of(config.to_dict())
    found = dict(shape.parameters)
    for number, layer in enumerate(shape.layers):
        found |= {f"model.layers.{number}.{name}": sizes for name, sizes in layer.parameters}
    built = {name: tuple(each.shape) for name, each in build_on_meta(config).named_parameters()}
    assert found == built


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("switched_on", [False, True])
def test_windows_are_those_of_the_built_layers(family, switched_on):
    config = tiny_config(family, use_sliding_window=switched_on, max_window_layers=1)
    costs: Counter[int | None] = Counter()
    shape = ModelShape.of(config.to_dict())
    for layer in shape.layers:
        costs[layer.window] += 4 * shape.query
    assert costs == count_flops(config).attention
