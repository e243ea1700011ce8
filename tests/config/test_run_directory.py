from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.errors import UsageError
from burnish.methods.table import METHODS, method_meant_by

GOOD = ["model.path=m", "data.train=[t]", "name=my"]


@pytest.mark.parametrize(
    ("overrides", "directory", "mirror"),
    [
        ([], "runs/my", None),
        (["output_dir=/scratch"], "/scratch/my", None),
        (["checkpoint.mirror=s3://b/runs/"], "runs/my", "s3://b/runs/my"),
        (["output_dir=hdfs://n:1/runs"], "runs/my", "hdfs://n:1/runs/my"),
    ],
)
def test_where_a_run_lies(overrides: list[str], directory: str, mirror: str | None) -> None:
    config = read_config(None, [*GOOD, *overrides])
    METHODS["sft"].check(config)
    assert config.directory == Path(directory)
    assert config.mirror_url == mirror


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model.path=models/Qwen3-0.6B/"], "Qwen3-0.6B-sft"),
        (["model.path=Qwen/Qwen3-0.6B@main", "reward.functions=numeric"], "Qwen3-0.6B-rl"),
        (["model.path=runs/a/checkpoints/step-00000002/model"], "a-sft"),
        (["model.path=s3://bucket/deep/m"], "m-sft"),
        (["model.path=."], "model-sft"),
        (["model.path=null", "model.fresh.model_type=qwen3"], "qwen3-sft"),
        (["model.path=null", "model.fresh=dir/my config.json"], "my-config.json-sft"),
    ],
)
def test_a_run_without_a_name_has_its_models(overrides: list[str], name: str) -> None:
    config = read_config(None, ["model.path=m", *overrides])
    assert method_meant_by(config).named(config).directory == Path("runs") / name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["name=" + "x" * 300], "200 bytes"),
        (["name=" + "ä" * 101], "200 bytes"),
        (["checkpoint.mirror=/mnt/far"], "checkpoint.mirror=file:///mnt/far"),
        (["checkpoint.mirror=s3://b", "output_dir=s3://b"], "output_dir"),
        (["checkpoint.mirror_keep_last=2"], "checkpoint.mirror_keep_last"),
    ],
)
def test_what_makes_no_sense(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        METHODS["sft"].check(read_config(None, [*GOOD, *overrides]))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "sft"),
        ({"label_smoothing": 0.1}, "sft"),
        ({"loss": {"sigmoid": 1.0}}, "dpo"),
        ({"beta": 0.2}, "dpo"),
        ({"unknown": 1}, "sft"),
    ],
)
def test_a_configuration_is_meant_for_the_method_that_has_its_settings(settings, name):
    config = RunConfig.model_validate({"model": {"path": "m"}, "method": settings})
    assert method_meant_by(config).name == name
