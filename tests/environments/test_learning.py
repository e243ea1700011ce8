"""The examples with environments do what the guide says: they run, and by night they learn."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.runs.training_files import done, metrics, rollouts

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory like a clone's, with the data of an example."""
    name, program, count = request.param
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES / name)
    write = runpy.run_path(str(EXAMPLES / name / program))["write"]
    write(tmp_path / "runs" / name, count)
    return tmp_path


def validated(run: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The numbers of held-out rows before and after training."""
    rows = [row for row in metrics(run) if "val/reward" in row]
    return rows[0], rows[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("example", [("calculator", "products.py", 40)], indirect=True)
def test_the_calculator_runs(example):
    files = "examples/calculator"
    few = ["steps=1", "batch.tokens_per_device=512"]
    done(example, "sft", f"{files}/sft.yaml", *few, "batch.examples=4", "optim.warmup_steps=0")
    model = "model.path=runs/calculator/warm-up/checkpoints/step-00000001/model"
    only = ["batch.prompts=2", "rollout.n=2", "tracking.rollouts_every=1"]
    unmeasured = ["evaluation.every=0", "data.validation=[]"]
    done(example, "rl", f"{files}/rl.yaml", model, *few, *only, *unmeasured)
    rows = rollouts(example / "runs" / "calculator" / "learned", 1)
    assert {row["end"] for row in rows} <= {"done", "length", "unreadable"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", [("calculator", "products.py", 4000)], indirect=True)
def test_a_new_model_learns_to_call_the_calculator(example):
    done(example, "sft", "examples/calculator/sft.yaml")
    done(example, "rl", "examples/calculator/rl.yaml")
    before, after = validated(example / "runs" / "calculator" / "learned")
    calls = "val/environment/calls"
    assert before["val/mean@4"] + 0.25 < after["val/mean@4"]
    assert before[calls] < 0.6 < 0.9 < after[calls]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", [("nim", "games.py", 4000)], indirect=True)
def test_a_new_model_learns_to_win_against_itself(example):
    done(example, "sft", "examples/nim/sft.yaml")
    done(example, "rl", "examples/nim/rl.yaml")
    before, after = validated(example / "runs" / "nim" / "wins")
    assert before["val/mean@64"] < 0.5 < 0.8 < after["val/mean@64"]
