"""Which weights `model.train` trains."""

from __future__ import annotations

from typing import Any

import pytest
from support.models.tiny import tiny_config

from burnish.errors import BurnishError
from burnish.families import ModelShape
from burnish.models.freezing import count_unfrozen, freeze
from burnish.models.meta_init import build_on_meta
from burnish.plan.model import PlannedModel


def trained(family: str, patterns: list[str]) -> set[str]:
    model = build_on_meta(tiny_config(family))
    freeze(model, patterns)
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_patterns_are_searched_in_names() -> None:
    model = build_on_meta(tiny_config("qwen3"))
    names = {name for name, _ in model.named_parameters()}
    assert trained("qwen3", ["."]) == names
    assert trained("qwen3", ["mlp", "^model.norm"]) == {
        name for name in names if "mlp" in name or name == "model.norm.weight"
    }
    assert trained("qwen3", [r"layers\.0\."]) == {n for n in names if "layers.0." in n}


@pytest.mark.parametrize(
    ("patterns", "word"), [(["mpl"], "mlp"), (["mlp", "q_prj"], "q_proj"), (["("], "(")]
)
def test_a_pattern_that_is_found_nowhere_is_refused(patterns: list[str], word: str) -> None:
    with pytest.raises(BurnishError) as raised:
        trained("qwen3", patterns)
    assert word in str(raised.value)


@pytest.mark.parametrize("patterns", [["mlp", "layers.1"], ["lm_head"], ["embed_tokens", "norm"]])
def test_the_planner_counts_what_is_trained(patterns: list[str]) -> None:
    config: Any = tiny_config("qwen3")
    shape = ModelShape.of(config.to_dict())
    planned = PlannedModel(shape, train=patterns)
    assert planned.unfrozen * shape.elements == pytest.approx(count_unfrozen(config, patterns))
