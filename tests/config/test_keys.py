from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import burnish
from burnish.config.keys import known_keys, plain_name

PACKAGE = Path(burnish.__file__).parent


def test_every_setting_leaves_a_choice_and_is_read() -> None:
    settings = [key for key in known_keys().values() if not key.section]
    named = [key for key in settings if key.values.startswith("one of ")]
    assert [key.name for key in named if ", " not in key.values] == []
    assert len(named) > 10
    # What describes the settings names all of them in its texts.
    described = [*(PACKAGE / "config").rglob("*.py")]
    code = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p not in described)
    nodes = (node for path in described for node in ast.walk(ast.parse(path.read_text())))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    attributes |= {*re.findall(r"\.(\w+)", code)}
    assert [key.name for key in settings if key.name.rpartition(".")[2] not in attributes] == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rollout.n", "a whole number, 1 or more"),
        ("steps", "a whole number, 1 or more, or null"),
        ("rollout.top_p", "a number, more than 0, at most 1"),
        ("engine.precision", "one of auto, bf16, fp32"),
        ("optim.lr", "auto, or a number, 0 or more"),
        ("reward.on_error", "drop, or a number"),
        ("data.shuffle", "true or false"),
        ("data.train", "a list of texts"),
        ("rollout.stop", "a list of texts, each not empty"),
        ("rollout.stop_token_ids", "a list of whole numbers, each 0 or more"),
        ("optim.betas", "a list of 2 numbers, each 0 or more, less than 1"),
        ("model.fresh", "text, or a mapping, or null"),
        ("reward.functions[].kwargs", "a mapping"),
        ("reward.functions", "a list of mappings with the keys function, weight, kwargs, per_call"),
        ("rollout", "a section of settings"),
        ("rollout.url", "a URL, http:// or https://, or null"),
        ("tracking.traces.endpoint", "env, or a URL, http:// or https://, or null"),
    ],
)
def test_words_for_values(name: str, values: str) -> None:
    assert known_keys()[name].values == values


def test_sections_come_before_their_keys_in_the_order_of_the_schema() -> None:
    names = list(known_keys())
    assert names[:2] == ["name", "output_dir"]
    assert names.index("algorithm") < names.index("algorithm.kl") < names.index("algorithm.kl.coef")


def test_plain_name() -> None:
    assert plain_name("reward.functions[12].weight") == "reward.functions[].weight"
