"""What recipes ask of a run beside its method: shares of steps, parts of epochs, some of the rows."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints.states import committed
from support.runs.training_files import done, metrics
from transformers import optimization


def transformers_rates(lr: float, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = optimization.get_cosine_schedule_with_warmup(optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_a_run_counts_in_shares_and_epochs(work):
    """7 rows, 3 a step: an epoch has 3 steps."""
    run = done(
        work, "sft", "sft.yaml", "name=counted", "steps=null", "epochs=2", "data.max_rows=7", "batch.examples=3",
        "optim={lr: 0.01, schedule: cosine, warmup_steps: 30%}", "evaluation={every: 1/2 epoch, before: false}",
        "checkpoint={save_every: 1 epoch, keep_last: 9}",
    )  # fmt: skip
    rows = metrics(run)
    assert [row["train/lr"] for row in rows] == pytest.approx(transformers_rates(0.01, 2, 6))
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 3, 5, 6]
    assert [each.step for each in committed(run / "checkpoints")] == [3, 6]
