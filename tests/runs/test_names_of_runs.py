"""Runs without a chosen name, runs that are used elsewhere, and directories in use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.states import save_once

from burnish.api import config_at, named_run
from burnish.cli.main import main
from burnish.config.document import dump_yaml
from burnish.config.schema import DataConfig, RunConfig
from burnish.data.columns import example_format
from burnish.data.sources import load_rows
from burnish.errors import IncompatibleError, UsageError
from burnish.files.lease import LEASE, holding_lease, require_free
from burnish.methods.table import METHODS
from burnish.tracking.rundir import RunDirectory

SFT = METHODS["sft"]
BASE: dict[str, Any] = {"model": {"path": "smol"}, "data": {"train": ["a.jsonl"]}}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "work"
    for name in ("smol", "other/smol"):
        (root / name).mkdir(parents=True)
    for name, text in (("a.jsonl", "{}\n"), ("b.jsonl", "{}\n{}\n")):
        (root / name).write_text(text)
    monkeypatch.chdir(root)
    return root


def name_of(**settings: Any) -> str:
    return named_run(SFT, RunConfig.model_validate({**BASE, **settings})).run_name


def begin(*, step: int | None = 2, **settings: Any) -> str:
    """Leave what a run leaves: a configuration, a number, and perhaps a step. Return its name."""
    config = named_run(SFT, RunConfig.model_validate({**BASE, **settings}))
    # A run records what auto is.
    engine = config.engine.model_copy(update={"precision": "bf16"})
    config = SFT.with_defaults(config.model_copy(update={"engine": engine}))
    directory = RunDirectory(config.directory)
    directory.root.mkdir(parents=True, exist_ok=True)
    directory.config.write_text(dump_yaml(config))
    directory.write_environment({"trainer": "sft", "directory": str(Path.cwd())})
    if step is not None:
        directory.metrics.write_text("{}\n")
        save_once(directory.checkpoints, step)
    return config.run_name


def test_another_experiment_gets_a_number_and_the_same_one_its_directory(work: Path) -> None:
    assert begin() == "smol-sft"
    assert name_of() == "smol-sft"
    assert begin(optim={"lr": 1.0}) == "smol-sft-2"
    assert begin(data={"train": ["b.jsonl"]}) == "smol-sft-3"
    assert begin(model={"path": "other/smol"}) == "smol-sft-4"
    assert name_of() == name_of(data={"train": ["./a.jsonl"]}) == "smol-sft"
    assert name_of(optim={"lr": 1.0}, steps=99) == "smol-sft-2"
    assert name_of(data={"train": ["b.jsonl"]}) == "smol-sft-3"
    assert name_of(model={"path": "other/smol"}) == "smol-sft-4"
    assert name_of(optim={"lr": 2.0}) == "smol-sft-5"
    shutil.rmtree("runs/smol-sft-2")
    assert name_of(optim={"lr": 2.0}) == "smol-sft-2"
    assert name_of(optim={"lr": 2.0}, resume="fresh") == "smol-sft"
    assert name_of(optim={"lr": 1.0}, name="smol-sft") == "smol-sft"
    assert begin(optim={"lr": 1.0}, model={"path": "smol", "lora": {"rank": 4}}) == "smol-sft-2"
    assert name_of(optim={"lr": 1.0}, model={"path": "smol", "lora": {"rank": 4}}) == "smol-sft-2"
    assert name_of(engine={"precision": "fp32"}) == "smol-sft-5"
    assert name_of(engine={"precision": "bf16"}) == "smol-sft"


def test_an_empty_name_is_refused_and_none_is_the_default() -> None:
    assert SFT.named(RunConfig(**BASE)).name == "smol-sft"
    with pytest.raises(UsageError):
        SFT.check(SFT.named(RunConfig(**BASE, name="")))


def test_what_moved_is_the_same(work: Path) -> None:
    begin()
    Path("a.jsonl").rename("moved.jsonl")
    assert name_of(data={"train": ["moved.jsonl"]}) == "smol-sft"
    shutil.copy("moved.jsonl", "a.jsonl")
    assert name_of(data={"train": ["moved.jsonl"]}) == "smol-sft"


def test_a_directory_without_steps_is_free_unless_it_is_in_use(work: Path) -> None:
    begin(step=None)
    assert name_of(optim={"lr": 1.0}) == "smol-sft"
    with holding_lease(Path("runs/smol-sft/checkpoints") / LEASE):
        assert name_of() == "smol-sft"
        assert name_of(optim={"lr": 1.0}) == "smol-sft-2"


def test_a_directory_in_use_is_incompatible(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / LEASE
    require_free(path)
    with holding_lease(path):
        with pytest.raises(IncompatibleError) as caught:
            require_free(path)
        with pytest.raises(IncompatibleError), holding_lease(path):
            pass
    assert "{" not in str(caught.value)
    require_free(path)


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_is_read_from_any_directory(
    moved: bool, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "rewards.py").write_text("")
    begin(
        name="mine",
        data={"train": ["a.jsonl", "org/name", "s3://bucket/a.jsonl"], "validation": ["*.jsonl"]},
        reward={"functions": [{"function": "rewards.py:right"}, {"function": "numeric"}]},
    )
    here, _ = config_at("runs/mine")
    assert isinstance(here, RunConfig)
    assert here.data.train[0] == "a.jsonl"
    if moved:
        work = work.rename(tmp_path / "elsewhere")
    else:
        (work / "runs/mine").rename(work / "runs/renamed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("not this one")
    there, _ = config_at(str(work / ("runs/mine" if moved else "runs/renamed")))
    assert isinstance(there, RunConfig)
    assert there.data.train == [str(work / "a.jsonl"), "org/name", "s3://bucket/a.jsonl"]
    assert there.data.validation == [str(work / "*.jsonl")]
    assert there.model.path == str(work / "smol")
    functions = [each.function for each in there.reward.functions]
    assert functions == [f"{work / 'rewards.py'}:right", "numeric"]


@pytest.mark.parametrize(
    "words", [["ppo"], ["kto"], ["grpo", "x.yaml"], ["ckpt", "list"], ["config", "x"]]
)
def test_an_unknown_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    written = capsys.readouterr().err
    assert all(part in written for part in ("have:", "want:", "do:"))


def test_preferences(work: Path) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    Path("pairs.jsonl").write_text(json.dumps(row) + "\n")
    rows = load_rows(["pairs.jsonl"])
    with pytest.raises(UsageError, match="preferences"):
        example_format(DataConfig(), rows)
    chosen = DataConfig(completion_column="chosen")
    assert example_format(chosen, rows) == ("pair", ("prompt", "chosen"))
