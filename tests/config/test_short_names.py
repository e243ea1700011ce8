"""Short names of settings, compared with the full names in the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.document import dotted
from burnish.config.foreign_names import foreign_names
from burnish.config.keys import known_keys
from burnish.config.load import load_settings, read_config
from burnish.config.short_names import full_name, meant_by
from burnish.errors import UsageError

NAMES = [name for name in known_keys() if "[" not in name]
ENDINGS = {name.split(".", depth)[-1] for name in NAMES for depth in range(1, name.count(".") + 1)}
OWNERS = {
    ending: [name for name in NAMES if name.endswith(f".{ending}")] for ending in sorted(ENDINGS)
}


def test_an_ending_of_one_setting_stands_for_it() -> None:
    tables = foreign_names()
    elsewhere = tables.different | tables.absent | tables.renamed
    for ending, owners in OWNERS.items():
        if ending in NAMES:
            assert full_name(ending) == ending
        elif ending not in elsewhere:
            assert full_name(ending) == (owners[0] if len(owners) == 1 else ending)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("lora.rank=16", "model.lora.rank=16"),
        ("precision=fp32", "engine.precision=fp32"),
        ("lora={rank: 4, alpha: 8}", "model.lora={rank: 4, alpha: 8}"),
        ("policy_loss=gspo", "algorithm.policy_loss=gspo"),
        ("max_length=99", "data.max_length=99"),
        ("chat_template_kwargs.thinking=false", "data.chat_template_kwargs.thinking=false"),
        ("functions=[numeric, a.py:b]", "reward.functions=[numeric, a.py:b]"),
        ("model=DIR", "model.path=DIR"),
        ("data=[a.jsonl, b.jsonl]", "data.train=[a.jsonl, b.jsonl]"),
        ("reward=numeric", "reward.functions=numeric"),
        ("environment=a.py:Game", "rollout.environment.function=a.py:Game"),
    ],
)
def test_the_command_line_takes_short_names(short: str, full: str) -> None:
    assert read_config(None, [short]) == read_config(None, [full])


def test_the_last_of_two_names_of_a_setting_counts() -> None:
    assert read_config(None, ["model.lora.rank=4", "lora.rank=8"]).model.lora.rank == 8
    assert read_config(None, ["lora.rank=8", "model.lora.rank=4"]).model.lora.rank == 4
    config = read_config(None, ["policy_loss.dual_clip=3", "algorithm.policy_loss=ppo"])
    assert config.algorithm.policy_loss.settings["dual_clip"] == 3


@pytest.mark.parametrize("setting", ["n=3", "lr=1e-4", "timeout_seconds=9"])
def test_what_several_settings_end_in_is_refused_with_all_of_them(setting: str) -> None:
    name = setting.partition("=")[0]
    assert len(OWNERS[name]) > 1
    with pytest.raises(UsageError) as caught:
        read_config(None, [setting])
    assert all(owner in str(caught.value) for owner in OWNERS[name])


def test_a_name_that_means_something_else_elsewhere_is_refused() -> None:
    assert OWNERS["model_dtype"] == ["checkpoint.model_dtype"]
    with pytest.raises(UsageError):
        read_config(None, ["model_dtype=fp32"])


def test_files_have_full_names(tmp_path: Path) -> None:
    for text in ("lora: {rank: 4}\n", "precision: fp32\n", "lora.rank: 4\n"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UsageError):
            read_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("keywords", "wanted"),
    [
        ({"lora": {"rank": 4}}, {"model.lora.rank": 4}),
        ({"precision": "fp32"}, {"engine.precision": "fp32"}),
        ({"lora.rank": 4, "model": Path("dir")}, {"model.lora.rank": 4, "model.path": "dir"}),
        ({"data": "a.jsonl"}, {"data.train": ["a.jsonl"]}),
        ({"data": ["a.jsonl", "b"]}, {"data.train": ["a.jsonl", "b"]}),
        ({"model": {"path": "dir"}, "steps": 3}, {"model.path": "dir", "steps": 3}),
    ],
)
def test_python_takes_short_names_and_no_file(
    keywords: dict[str, Any], wanted: dict[str, Any]
) -> None:
    config = load_settings(None, keywords)
    assert dict(dotted(config.model_dump(exclude_unset=True))) == wanted


def test_a_short_name_means_all_that_end_in_it() -> None:
    assert meant_by("temperature") == ["rollout.temperature", "evaluation.temperature"]
    assert meant_by("lora") == ["model.lora"]
    rewards = ["reward.functions[].weight", "reward.models[].weight"]
    assert meant_by("weight") == [*rewards, "algorithm.advantage.weight", "distill.weight"]
    assert meant_by("rollout.n") == ["rollout.n"]
    assert meant_by("nothing") == meant_by("model_dtype") == []
