"""What recipes ask of a run beside its method: shares of steps, parts of epochs, some of the rows."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.states import committed
from support.nightly import by_day
from support.runs.training_files import At, burnish, done, metrics, rollouts, write_rows
from transformers import optimization

from burnish.api import Result
from burnish.config.load import read_config

HELD_OUT = ["data.validation=20%", "evaluation.every=1", "checkpoint.save_every=1"]


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


@pytest.mark.parametrize("weights", by_day([[], ["data.weights=[1, 1]"]], [[]]))
@pytest.mark.nightly
def test_rows_that_are_held_out_never_train(work, weights):
    """Of two files with equal rows, in all epochs and on any number of processes; a killed run goes on with the same rows."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    write_rows(work / "one.jsonl", rows[:10] + rows[:3])
    write_rows(work / "other.jsonl", rows[10:] + rows[10:12])
    name = f"apart{len(weights)}"
    words = ["rl", "rl.yaml", "data.train=[one.jsonl, other.jsonl]", "steps=6", *HELD_OUT, *weights]
    whole = done(work, *words, f"name={name}")
    trained = {row["prompt"] for step in range(1, 7) for row in rollouts(whole, step)}
    asked = Counter(row["prompt"] for row in rollouts(whole, 6, "validation"))
    assert len(trained) > 8
    assert asked.total() >= 4
    assert not trained & set(asked)
    for step in range(6):
        assert Counter(row["prompt"] for row in rollouts(whole, step, "validation")) == asked
    words.append(f"name={name}_again")
    code, _ = burnish(work, *words, at=At("burnish.runs.run:Run.finish", 3, signal.SIGKILL))
    assert code == -signal.SIGKILL
    again = done(work, *words, "seed=0", world=2)
    assert Counter(row["prompt"] for row in rollouts(again, 6, "validation")) == asked
    assert not asked.keys() & {row["prompt"] for row in rollouts(again, 6)}


@pytest.mark.nightly
def test_a_share_of_the_examples_is_validated_as_a_file_of_them_is(work):
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    run = done(work, "sft", "sft.yaml", "name=share", "steps=1", "data.max_rows=20", *HELD_OUT)
    asked = {row["prompt"] for row in _validated(work)}
    write_rows(work / "kept.jsonl", [row for row in rows[:20] if row["prompt"] not in asked])
    write_rows(work / "held_out.jsonl", [row for row in rows[:20] if row["prompt"] in asked])
    files = ["data.train=[kept.jsonl]", "data.validation=[held_out.jsonl]", "evaluation.every=1"]
    by_file = done(work, "sft", "sft.yaml", "name=files", "steps=1", *files)
    assert 4 <= len(asked) < 20
    for one, other in zip(metrics(run), metrics(by_file), strict=True):
        assert {n: x for n, x in one.items() if n.endswith("loss")} == {
            n: x for n, x in other.items() if n.endswith("loss")
        }
    code, said = burnish(work, "eval", str(run), "--dry-run")
    assert code == 0, said
    code, said = burnish(work, "eval", str(run))
    assert code == 0
    assert f"{metrics(run)[-1]['val/loss']:.3f}" in said
    code, said = burnish(
        work, "sft", "sft.yaml", "name=share", "data.max_rows=20", *HELD_OUT, "--dry-run"
    )
    assert code == 0, said


def _validated(work):
    """The rows that a share of 20 % of the first 20 holds out, by prompts that an evaluation asks."""
    run = done(work, "rl", "rl.yaml", "name=share_rl", "steps=1", "data.max_rows=20", *HELD_OUT)
    return rollouts(run, 1, "validation")


def test_another_share_does_not_resume(work):
    words = ["sft", "sft.yaml", "name=shares", "data.validation=20%"]
    done(work, *words, "steps=1")
    code, _ = burnish(work, *words[:3], "data.validation=50%", "steps=2")
    assert code == 4
    code, _ = burnish(work, *words[:3], "data.validation=[validation.jsonl]", "steps=2")
    assert code == 4
    done(work, *words, "steps=2")


@pytest.mark.nightly
def test_a_run_keeps_the_learning_rate_that_it_began_with(work):
    """The default of earlier versions, as they recorded it; a rate that was chosen is to be chosen again."""
    settings = json.loads((work / "sft.yaml").read_text())
    del settings["optim"]
    (work / "open.yaml").write_text(json.dumps(settings))
    for name, began, then in (("new", "auto", 1e-5), ("former", "1e-6", 1e-6)):
        words = ["sft", "open.yaml", f"name={name}_rate"]
        done(work, *words, f"optim.lr={began}", "steps=1")
        run = done(work, *words, "steps=2")
        assert [row["train/lr"] for row in metrics(run) if row["step"]] == [then, then]
        assert read_config(run / "config.yaml").optim.lr == then
    words = ["sft", "open.yaml", "name=chosen_rate"]
    done(work, *words, "optim.lr=1e-3", "steps=1")
    code, _ = burnish(work, *words, "steps=2")
    assert code == 4
    run = done(work, *words, "steps=2", "resume=fresh")
    assert [row["train/lr"] for row in metrics(run) if row["step"]] == [1e-5, 1e-5]


def test_a_run_says_how_many_parameters_it_trains(work):
    """At its start, in a dry run, and in its result: an adapter's are those of its file."""
    whole = done(work, "sft", "sft.yaml", "name=whole", "steps=1")
    base = whole / "checkpoints/step-00000001/model"
    count = sum(each.numel() for each in load_file(base / "model.safetensors").values())
    assert f" {count:,} " in repr(Result(whole))
    words = [
        "sft", "sft.yaml", "name=part", "steps=1", "model.fresh=null", f"model.path={base}", "model.lora.rank=2",
        "model.lora.modules_to_save=[norm]",
    ]  # fmt: skip
    code, planned = burnish(work, *words, "--dry-run")
    assert code == 0
    run = done(work, *words)
    tensors = load_file(run / "checkpoints/step-00000001/model/adapter_model.safetensors")
    trained = sum(each.numel() for each in tensors.values())
    assert 0 < trained < count
    for said in (planned, (run / "logs/rank-0.log").read_text(), repr(Result(run))):
        assert f" {trained:,} (" in said
