"""A method of one's own: the DPO of the guide, as it stands there, against plain torch; and what is refused."""

from __future__ import annotations

import json
import re
import signal
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.nightly import by_day
from support.runs.preferences import PAIRS, SETTINGS, load_model, near, trained_by_torch
from support.runs.same_runs import assert_same
from support.runs.training_files import (
    At,
    burnish,
    done,
    make_files,
    metrics,
    ranks,
    rollouts,
    write_rows,
)

import burnish as package
from burnish.errors import UsageError
from burnish.method import Method
from burnish.methods.table import load_method

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "add-a-method.md"
MOST_LINES = 60
RUN = ("run", "dpo.py:DPO", "dpo.yaml")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    make_files(tmp_path)
    found = re.search(r'^```python title="dpo.py"\n(.*?)^```', GUIDE.read_text(), re.M | re.S)
    assert found is not None
    code = found[1]
    assert len(code.splitlines()) <= MOST_LINES
    (tmp_path / "dpo.py").write_text(code)
    (tmp_path / "dpo.yaml").write_text(json.dumps(SETTINGS))
    write_rows(tmp_path / "pairs.jsonl", PAIRS)
    return tmp_path


def test_it_is_dpo_on_one_process_and_two(work: Path) -> None:
    start = done(
        work, "sft", "sft.yaml", "name=start", "steps=1", "optim.lr=0", "evaluation.every=0"
    )
    model = f"{start}/checkpoints/step-00000001/model"
    begun = [f"model.path={model}", "model.fresh=null"]
    alone = done(work, *RUN, *begun)
    wanted, losses = trained_by_torch(Path(model))
    rows = metrics(alone)
    np.testing.assert_allclose([row["train/loss"] for row in rows], losses, rtol=1e-5)
    assert rows[0]["train/accuracy"] == 0.0  # no margin before the first step
    near(load_model(alone), wanted, 2e-5)
    both = done(work, *RUN, *begun, "name=both", world=2)
    near(load_model(both), load_model(alone), 2e-5)
    assert (work / "runs/both/environment.json").read_text().count('"small-dpo"') == 1


@pytest.mark.parametrize("world", by_day([1, 2], [1]))
def test_a_killed_run_goes_on_to_the_bit(work: Path, world: int) -> None:
    saves = ["checkpoint.save_every=1"]
    whole = done(work, *RUN, *saves, world=world)
    at = At("burnish.methods.parts.offline_training:make_batch", 4, signal.SIGKILL)
    commands = ranks(work, [*RUN, *saves, "name=killed"], world, at=at)
    assert all(command.wait() != 0 for command in commands)
    assert (work / "runs/killed/checkpoints/step-00000002").is_dir()
    assert_same(done(work, *RUN, *saves, "name=killed", world=world), whole)


def test_an_adapter_learns_with_it_turned_off_as_the_start(work: Path) -> None:
    start = done(work, "sft", "sft.yaml", "name=start", "steps=1", "evaluation.every=0")
    model = f"model.path={start}/checkpoints/step-00000001/model"
    run = done(work, *RUN, model, "model.fresh=null", "model.lora.rank=4")
    losses = [row["train/loss"] for row in metrics(run)]
    assert losses[0] == pytest.approx(np.log(2))  # the adapter begins as nothing
    assert losses[-1] != pytest.approx(losses[0])


def test_a_dry_run_says_what_is_meant(work: Path) -> None:
    code, output = burnish(work, *RUN, "--dry-run")
    assert code == 0, output
    assert "burnish run dpo.py:DPO dpo.yaml" in output
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ((*RUN, "method.beta=much"), ["method", "beta"]),
        ((*RUN, "method.gamma=1.0"), ["method", "gamma", "beta"]),
        ((*RUN, "method.name=dpo"), ["method.name", "burnish run"]),
        ((*RUN, "data.train=[train.jsonl]"), ["chosen"]),
        (("run", "dpo.py:Dpo", "dpo.yaml"), ["dpo.py", "Dpo"]),
        (("run", "rewards.py:letters", "dpo.yaml"), ["rewards.py:letters", "class"]),
        (("run", "nothing", "dpo.yaml"), ["nothing"]),
        (
            ("sft", "dpo.yaml", "data.completion_column=chosen", "--dry-run"),
            ["method.beta", "loss"],
        ),
    ],
)
def test_mistakes_end_before_anything_is_written(
    work: Path, argv: tuple[str, ...], facts: list[str]
) -> None:
    code, output = burnish(work, *argv)
    assert code in (2, 5), output
    said = output.partition("error: ")[2]
    assert [fact for fact in facts if fact not in said] == [], output
    assert "Traceback" not in output
    assert not list((work / "runs").glob("*/checkpoints/step-*"))


def test_a_changed_file_is_another_formula(work: Path) -> None:
    done(work, *RUN, "checkpoint.save_every=2")
    with (work / "dpo.py").open("a") as file:
        file.write("# another word\n")
    code, output = burnish(work, *RUN, "checkpoint.save_every=2", "steps=6")
    assert code == 4, output
    assert "formula" in output


def test_what_is_no_method_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import burnish\n"
        "class Unnamed(burnish.RL): name, title = '', 'x'\n"
        "class Taken(burnish.RL): name, title = 'sft', 'x'\n"
        "class Abstract(burnish.Method): name, title = 'x', 'y'\n"
        "class Lossless(burnish.OfflineMethod): name, title = 'x', 'y'\n"
        "class Good(burnish.OfflineMethod):\n"
        "    name, title = 'x', 'y'\n"
        "    def loss(self, config): return None\n"
    )
    for name in ("Unnamed", "Taken", "Abstract", "Lossless"):
        with pytest.raises(UsageError, match=name):
            load_method(f"mine.py:{name}")
    good = load_method("mine.py:Good")
    assert isinstance(good, Method)
    assert good.command == ["run", "mine.py:Good"]
    assert load_method("rl").command == ["rl"]
    assert issubclass(package.OfflineMethod, package.Method)


@pytest.mark.nightly
def test_rejection_sampling_learns_from_the_best_alone(work: Path) -> None:
    found = re.search(r'^```python title="rejection.py"\n(.*?)^```', GUIDE.read_text(), re.M | re.S)
    assert found is not None
    (work / "rejection.py").write_text(found[1])
    argv = ["run", "rejection.py:RejectionSampling", "rl.yaml", "method.keep=1", "steps=2"]
    run = done(work, *argv, "evaluation.every=0")
    for row in metrics(run)[1:]:  # the first one is the validation before training
        drawn = rollouts(run, int(row["step"]))
        best: dict[int, dict[str, Any]] = {}
        for rollout in sorted(drawn, key=itemgetter("sample"), reverse=True):
            prompt = rollout["prompt_index"]
            if prompt not in best or rollout["reward"] >= best[prompt]["reward"]:
                best[prompt] = rollout
        assert len(drawn) == 4 * len(best)
        assert row["actor/tokens"] == sum(rollout["length"] for rollout in best.values())
    alike = done(work, *argv, "evaluation.every=0", "name=two", world=2)
    near(load_model(alike, 2), load_model(run, 2), 1e-2)


def test_what_it_trained_is_measured_as_any_model(work: Path) -> None:
    done(work, *RUN)
    code, output = burnish(work, "eval", "runs/run", "data.validation=[validation.jsonl]")
    assert code == 0, output
    assert "val/loss" in output


def test_rows_are_read_as_the_method_reads_them(work: Path) -> None:
    (work / "mine.py").write_text(
        "import burnish\n"
        "class First(burnish.RL):\n"
        "    name, title = 'first', 'learning from the first rows'\n"
        "    def dataset(self, foundation, paths, setting, **how):\n"
        "        return super().dataset(foundation, paths, setting, **{**how, 'first': 4})\n"
        "    def rows_per_step(self, config): return 4\n"
    )
    argv = ["run", "mine.py:First", "rl.yaml", "steps=null", "epochs=2", "evaluation.every=0"]
    run = done(work, *argv)
    steps = [row["step"] for row in metrics(run)]
    assert steps == [0, 1, 2]
    assert {row["prompt_index"] for step in (1, 2) for row in rollouts(run, step)} == {0, 1, 2, 3}


def test_a_method_without_a_workload_is_not_planned(work: Path) -> None:
    (work / "mine.py").write_text(
        "import burnish\n"
        "class Plain(burnish.Method):\n"
        "    name, title = 'plain', 'x'\n"
        "    def problems(self, config): yield from ()\n"
        "    def dataset(self, foundation, paths, setting, *, first=None, progress=None, pool=None):\n"
        "        from burnish.runs.setup import example_dataset\n"
        "        return example_dataset(foundation, paths, setting, first, progress)\n"
        "    def run(self, config, layout, device, run_dir=None): return {}\n"
    )
    code, output = burnish(
        work, "run", "mine.py:Plain", "sft.yaml", "--dry-run", "--devices", "1xH100-80G"
    )
    assert code == 0, output
    assert "not planned: the method plain" in output
