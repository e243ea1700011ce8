"""`burnish rm` by step, against transformers' token classifier trained by plain torch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs.preferences import SETTINGS, STEPS, begin_pairs, load_model, near
from support.runs.same_runs import assert_same
from support.runs.training_files import At, burnish, done, metrics, ranks, write_rows
from torch.nn.functional import logsigmoid
from transformers import AutoModelForTokenClassification, AutoTokenizer

RUN = ("rm", "rm.yaml")
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{a}+{b}=", "completions": [f"{a}", f"so {a + b}", "ok"][: 1 + a % 3],
     "labels": [b > 1, 1, False][: 1 + a % 3]}
    for a in range(4)
    for b in range(1, 5)
]  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("steps")
    begin_pairs(
        work,
        "rm.yaml",
        method={"step_separator": ";"},
        data={**SETTINGS["data"], "train": ["steps.jsonl"]},
    )
    write_rows(work / "steps.jsonl", ROWS)
    return work


def row_loss(
    model: torch.nn.Module, tokenizer: Any, row: dict[str, Any]
) -> tuple[torch.Tensor, int]:
    """The sum of the losses of a row's steps, by the model's value after each, and their number."""
    text = row["prompt"]
    total = torch.zeros(())
    for step, label in zip(row["completions"], row["labels"], strict=True):
        text += f"{step};"
        ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")
        value = model(ids).logits[0, -1, 0]
        total = total - logsigmoid(value if label else -value)
    return total, len(row["labels"])


@pytest.mark.nightly
def test_it_is_a_token_classifier_trained_on_steps(work: Path) -> None:
    begun = done(work, *RUN, "name=begun", "steps=1", "optim.lr=0")
    start = begun / "checkpoints/step-00000001/model"
    model = AutoModelForTokenClassification.from_pretrained(start, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        found = [row_loss(model, tokenizer, row) for row in ROWS[4 * step : 4 * step + 4]]
        loss = sum(part for part, _ in found) / sum(count for _, count in found)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    argv = [*RUN, "data.validation=[steps.jsonl]", "checkpoint.save_every=1"]
    run = done(work, *argv, "name=alone")
    rows = metrics(run)
    trained = [row["train/loss"] for row in rows if "train/loss" in row]
    np.testing.assert_allclose(trained, losses, rtol=1e-5)
    near(load_model(run), dict(model.state_dict()), 2e-5)
    with torch.no_grad():
        held_out = [row_loss(model, tokenizer, row) for row in ROWS]
    mean = float(sum(part for part, _ in held_out)) / sum(count for _, count in held_out)
    assert rows[-1]["val/loss"] == pytest.approx(mean, rel=1e-4)
    assert rows[-1]["val/accuracy"] > 0.6
    assert_same(done(work, *argv, "name=shared", world=2), run)
    at = At("burnish.methods.parts.offline_training:make_batch", 8, signal.SIGKILL)
    (command,) = ranks(work, [*argv, "name=killed"], 1, at=at)
    assert command.wait() != 0
    assert_same(done(work, *argv, "name=killed"), run)


@pytest.mark.nightly
def test_rows_without_a_label_for_each_step_are_refused(work: Path) -> None:
    write_rows(work / "short.jsonl", [{**ROWS[2], "labels": []}, *ROWS])
    write_rows(work / "unclear.jsonl", [{**ROWS[0], "labels": ["maybe"]}, *ROWS])
    for data, facts in {"short": ["row 0", "completions"], "unclear": ["row 0", "'maybe'"], "pairs": ["completions"]}.items():  # fmt: skip
        argv = [*RUN, "name=wrong", f"data.train=[{data}.jsonl]", "--dry-run"]
        code, output = burnish(work, *argv)
        assert code in (2, 5), output
        said = output.partition("error: ")[2]
        assert [fact for fact in facts if fact not in said] == [], output
        assert "Traceback" not in output
