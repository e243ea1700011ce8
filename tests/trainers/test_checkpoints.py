"""What a run does with its checkpoints, through the real command."""

from __future__ import annotations

import pytest
from training_files import burnish, done, metrics

from burnish.checkpoint.committed import committed


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_steps_are_kept(work, mode):
    run = done(
        work, "sft", "sft.yaml", f"name=best_{mode}", "optim.lr=0.5", "evaluation.every=1",
        "checkpoint.save_every=1", "checkpoint.keep_last=1", f"checkpoint.keep_best={{metric: val/loss, mode: {mode}}}",
    )  # fmt: skip
    losses = {row["step"]: row["val/loss"] for row in metrics(run) if row["step"]}
    best = {"min": min, "max": max}[mode](losses, key=losses.get)
    steps = committed(run / "checkpoints")
    assert [step.step for step in steps] == sorted({best, 6})
    assert steps[0].state["measured"] == {"val/loss": losses[best]}


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(work):
    code, output = burnish(
        work, "sft", "sft.yaml", "name=unmeasured", "checkpoint.keep_best={metric: val/los, mode: min}"
    )  # fmt: skip
    assert code == 2, output
    assert "does not measure val/los" in output
    assert "val/loss" in output
    assert "\nstep " not in output
