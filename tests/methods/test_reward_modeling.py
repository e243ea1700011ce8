"""`burnish rm` against transformers and plain torch; what it writes judges completions."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs.preferences import PAIRS, STEPS, begin_pairs, load_model, near
from support.runs.same_runs import assert_same
from support.runs.training_files import (
    At,
    burnish,
    done,
    metrics,
    ranks,
    rollouts,
    write_rows,
)
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

RUN = ("rm", "rm.yaml")
CENTER = 0.1


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("rm")
    begin_pairs(work, "rm.yaml", method={"center": CENTER})
    return work


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    return done(work, *RUN, "name=alone", "data.validation=[pairs.jsonl]")


def reward(model: torch.nn.Module, tokenizer: AutoTokenizer, text: str) -> torch.Tensor:
    ids = tokenizer.encode(text, add_special_tokens=False, return_tensors="pt")  # type: ignore[attr-defined]
    logits: torch.Tensor = model(ids).logits
    return logits[0, 0]


@pytest.mark.nightly
def test_it_is_bradley_and_terrys_model(work: Path, alone: Path) -> None:
    begun = done(work, *RUN, "name=begun", "steps=1", "optim.lr=0")
    start = begun / "checkpoints/step-00000001/model"
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = torch.zeros(())
        for row in PAIRS[4 * step : 4 * step + 4]:
            chosen, rejected = (
                reward(model, tokenizer, row["prompt"] + row[column])
                for column in ("chosen", "rejected")
            )
            loss = loss - logsigmoid(chosen - rejected) / 4
            loss = loss + CENTER * (chosen + rejected) ** 2 / 4
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    rows = metrics(alone)
    found = [row["train/loss"] for row in rows if "train/loss" in row]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    # A hundredth of a step: AdamW makes more of rounding where gradients are nearly 0.
    near(load_model(alone), dict(model.state_dict()), 1e-4)
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert rows[-1]["val/accuracy"] > 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("shared", [1, 2])
def test_two_processes_do_what_one_does(work: Path, alone: Path, shared: int) -> None:
    argv = [*RUN, f"name=shared{shared}", "data.validation=[pairs.jsonl]"]
    argv.append(f"engine.sequence_parallel={shared}")
    assert_same(done(work, *argv, world=2), alone)


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_bit(work: Path) -> None:
    argv = [*RUN, "checkpoint.save_every=1"]
    whole = done(work, *argv, "name=whole")
    at = At("burnish.methods.parts.offline_training:make_batch", 4, signal.SIGKILL)
    (command,) = ranks(work, [*argv, "name=killed"], 1, at=at)
    assert command.wait() != 0
    assert_same(done(work, *argv, "name=killed"), whole)


@pytest.mark.nightly
def test_an_adapter_and_its_head_are_peft(work: Path) -> None:
    """PEFT and transformers compute what the run measured; a killed run goes on to the bit; two processes do what one does."""
    from peft import AutoPeftModelForSequenceClassification

    argv = [*RUN, "model.lora.rank=4", "data.validation=[pairs.jsonl]", "checkpoint.save_every=1"]
    run = done(work, *argv, "name=adapted")
    rows = metrics(run)
    assert rows[-1]["val/accuracy"] > rows[0]["val/accuracy"]
    path = run / f"checkpoints/step-{STEPS:08d}/model"
    model = AutoPeftModelForSequenceClassification.from_pretrained(
        path, num_labels=1, torch_dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        leads = [
            float(
                reward(model, tokenizer, row["prompt"] + row["chosen"])
                - reward(model, tokenizer, row["prompt"] + row["rejected"])
            )
            for row in PAIRS
        ]
    assert rows[-1]["val/margin"] == pytest.approx(np.mean(leads), rel=1e-4)
    at = At("burnish.methods.parts.offline_training:make_batch", 12, signal.SIGKILL)
    (command,) = ranks(work, [*argv, "name=adapted-killed"], 1, at=at)
    assert command.wait() != 0
    assert_same(done(work, *argv, "name=adapted-killed"), run)
    assert_same(done(work, *argv, "name=adapted-shared", world=2), run)
    stages = ["engine.kind=megatron", "engine.pipeline_parallel=2"]
    assert_same(done(work, *argv, *stages, "name=adapted-stages", world=2), run)
    code, output = burnish(work, "eval", str(run))
    assert (code, "merge_and_unload" in output, "Traceback" in output) == (4, True, False), output
    # Merged, it judges completions.
    merged = work / "merged"
    model.merge_and_unload().save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    models = f"reward.models=[{{path: {merged}}}]"
    done(work, "rl", "rl.yaml", "name=judged-merged", "steps=1", models, "reward.functions=[]")


def test_what_it_writes_judges_completions(work: Path, alone: Path) -> None:
    path = alone / f"checkpoints/step-{STEPS:08d}/model"
    models = f"reward.models=[{{path: {path}}}]"
    run = done(work, "rl", "rl.yaml", "name=judged", "steps=1", models, "reward.functions=[]")
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    drawn = rollouts(run, 1)
    with torch.no_grad():
        wanted = [float(reward(model, tokenizer, r["prompt"] + r["completion"])) for r in drawn]
    np.testing.assert_allclose([r["reward"] for r in drawn], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_reward_model_is_measured_by_subset(work: Path, alone: Path) -> None:
    """Rows as RewardBench has them: `burnish eval` of the run, and of the model that it wrote."""
    path = alone / f"checkpoints/step-{STEPS:08d}/model"
    rows = [{**row, "subset": name} for row, name in zip(PAIRS, "aabbb" * 4, strict=False)]
    write_rows(work / "bench.jsonl", rows)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        leads = {
            name: [
                float(
                    reward(model, tokenizer, row["prompt"] + row["chosen"])
                    - reward(model, tokenizer, row["prompt"] + row["rejected"])
                )
                for row in rows
                if row["subset"] == name
            ]
            for name in "ab"
        }
    everything = [lead for own in leads.values() for lead in own]
    for place in (str(alone), str(path)):
        argv = ["eval", place, "data.validation=[bench.jsonl]", "engine.precision=fp32", "--json"]
        code, output = burnish(work, *argv)
        assert code == 0, output
        found = json.loads(output[output.index("{") :])
        for prefix, own in {"": everything, "a/": leads["a"], "b/": leads["b"]}.items():
            accuracy = sum(lead > 0 for lead in own) / len(own)
            assert found[f"val/{prefix}accuracy"] == pytest.approx(accuracy)
            margin = sum(own) / len(own)
            assert found[f"val/{prefix}margin"] == pytest.approx(margin, rel=1e-4, abs=1e-5)
    code, output = burnish(work, "eval", str(path), "data.validation=[bench.jsonl]", "--dry-run")
    assert code == 0, output
    code, output = burnish(work, "eval", str(path), "data.validation=[train.jsonl]")
    assert code in (2, 5), output
    assert "Traceback" not in output


def test_mistakes_end_before_anything_is_written(work: Path) -> None:
    refused = (["model.train=[norm]"], "model.train"), (["method.center=-1"], "center")
    for argv, fact in refused:
        code, output = burnish(work, *RUN, "name=wrong", *argv, "--dry-run")
        assert code == 2, output
        assert fact in output.partition("error: ")[2]
        assert "Traceback" not in output
    assert not (work / "runs/wrong").exists()
