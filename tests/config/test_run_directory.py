from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.constraints import check
from burnish.config.load import load_config
from burnish.errors import UsageError

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
    config = load_config(None, [*GOOD, *overrides]).config
    check(config, "sft")
    assert config.directory == Path(directory)
    assert config.mirror_url == mirror


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.mirror=/mnt/far"], "checkpoint.mirror=file:///mnt/far"),
        (["checkpoint.mirror=s3://b", "output_dir=s3://b"], "output_dir"),
        (["checkpoint.mirror_keep_last=2"], "checkpoint.mirror_keep_last"),
    ],
)
def test_what_makes_no_sense(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(load_config(None, [*GOOD, *overrides]).config, "sft")
    assert words in str(caught.value)
