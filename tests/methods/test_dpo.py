"""`burnish dpo` against plain torch, on one process and several, interrupted, with adapters; and what is refused."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.nightly import by_day
from support.runs.preferences import (
    BETA,
    PAIRS,
    STEPS,
    begin_pairs,
    load_model,
    log_likelihood,
    near,
    trained_by_torch,
)
from support.runs.same_runs import assert_same
from support.runs.training_files import (
    At,
    burnish,
    done,
    metrics,
    ranks,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.tracking.rollouts import read_rollouts, rollout_files

RUN = ("dpo", "dpo.yaml")
KTO = ["method.loss={kto: 1}"]
ANSWERS = [
    {"prompt": row["prompt"], "completion": row[column], "label": column == "chosen"}
    for row, column in zip(PAIRS, ["chosen", "rejected"] * 8, strict=True)
]
LAYOUTS = {
    "fsdp": [],
    "tp": ["engine.tensor_parallel=2"],
    "sp": ["engine.sequence_parallel=2"],
    "hsdp": ["engine.replicas=2"],
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("dpo")
    begin_pairs(work, "dpo.yaml")
    write_rows(work / "answers.jsonl", ANSWERS)
    return work


@pytest.fixture(scope="module")
def other(work: Path) -> Path:
    """The directory of another model with the same tokens."""
    run = done(work, "sft", "sft.yaml", "name=other", "steps=1", "optim.lr=0", "seed=7")
    return run / "checkpoints/step-00000001/model"


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    return done(work, *RUN, "name=alone", "data.validation=[pairs.jsonl]")


def test_it_is_the_papers_formula(work: Path, alone: Path) -> None:
    wanted, losses = trained_by_torch(work / "runs/start/checkpoints/step-00000001/model")
    rows = metrics(alone)
    trained = [row for row in rows if "train/loss" in row]
    np.testing.assert_allclose([row["train/loss"] for row in trained], losses, rtol=1e-5)
    near(load_model(alone), wanted, 2e-5)
    # Before the first step the model is its own reference, whose log-probs were packed otherwise.
    assert rows[0]["val/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert rows[0]["val/margin"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert rows[-1]["val/accuracy"] > 0.5


@pytest.fixture(scope="module")
def apart(work: Path, other: Path) -> Path:
    """A run whose reference is another model, so that no margin is 0."""
    return done(
        work, *RUN, "name=apart", "data.validation=[pairs.jsonl]", f"method.reference={other}"
    )


@pytest.mark.parametrize("layout", by_day(LAYOUTS, ["fsdp"]))
@pytest.mark.nightly
def test_two_processes_do_what_one_does(
    work: Path, other: Path, apart: Path, layout: str, tmp_path: Path
) -> None:
    argv = [*RUN, f"name={layout}", "data.validation=[pairs.jsonl]", *LAYOUTS[layout]]
    cache = {"BURNISH_CACHE": str(tmp_path)}
    argv.append(f"method.reference={other}")
    assert_same(done(work, *argv, world=2, environ=cache), apart)


def written_rows(run: Path, wanted: int) -> dict[tuple[int, int], dict[str, Any]]:
    """What the validation of a step wrote, by prompt and sample."""
    return {
        (row["prompt_index"], row["sample"]): row
        for step, path in rollout_files(run / "rollouts", "validation")
        for row in read_rollouts(path)
        if step == wanted
    }


@pytest.mark.nightly
def test_a_validation_writes_its_pairs(work: Path, other: Path, apart: Path) -> None:
    """Both answers of each held-out row as samples of one prompt, with β r and the margin."""
    rows = written_rows(apart, STEPS)
    assert len(rows) == 2 * len(PAIRS)
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
        for each in (apart / f"checkpoints/step-{STEPS:08d}/model", other)
    )
    tokenizer = AutoTokenizer.from_pretrained(other)
    for index, pair in enumerate(PAIRS):
        rewards = []
        for sample, side in enumerate(("chosen", "rejected")):
            row = rows[index, sample]
            assert (row["prompt"], row["completion"]) == (pair["prompt"], pair[side])
            with torch.no_grad():
                now, before = (
                    log_likelihood(model, tokenizer, pair["prompt"], pair[side])
                    for model in (policy, frozen)
                )
            rewards.append(BETA * float(now - before))
            assert row["reward"] == pytest.approx(rewards[sample], rel=1e-4, abs=1e-4)
        for sample in (0, 1):
            margin = rows[index, sample]["reward_parts"]["margin"]
            assert margin == pytest.approx(rewards[0] - rewards[1], rel=1e-4, abs=1e-4)


@pytest.mark.nightly
def test_a_reference_of_ones_own_is_the_papers(work: Path, other: Path, apart: Path) -> None:
    start = work / "runs/start/checkpoints/step-00000001/model"
    wanted, losses = trained_by_torch(start, other)
    trained = [row["train/loss"] for row in metrics(apart) if "train/loss" in row]
    np.testing.assert_allclose(trained, losses, rtol=1e-5)
    near(load_model(apart), wanted, 2e-5)


@pytest.mark.nightly
def test_streamed_pairs_train_as_read_ones(work: Path, alone: Path) -> None:
    """Their reference stays in memory. What is equal, empty or too long is left out."""
    odd = [{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}, {**PAIRS[0], "chosen": "7" * 40}]
    write_rows(work / "odd.jsonl", [*PAIRS[:1], *odd, *PAIRS[1:]])
    streamed = ["data.streaming=1", "data.train=[odd.jsonl]", "data.validation=[pairs.jsonl]"]
    run = done(work, *RUN, "name=streamed", *streamed)
    near(load_model(run), load_model(alone), 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on_to_the_bit(work: Path, world: int) -> None:
    argv = [*RUN, "checkpoint.save_every=1"]
    whole = done(work, *argv, f"name=whole{world}", world=world)
    at = At("burnish.methods.parts.offline_training:make_batch", 4, signal.SIGKILL)
    commands = ranks(work, [*argv, f"name=killed{world}"], world, at=at)
    assert all(command.wait() != 0 for command in commands)
    assert_same(done(work, *argv, f"name=killed{world}", world=world), whole)


def test_an_adapter_is_its_own_reference_when_it_is_off(work: Path) -> None:
    run = done(work, *RUN, "name=adapter", "model.lora.rank=4", "steps=2")
    losses = [row["train/loss"] for row in metrics(run)]
    assert losses[0] == pytest.approx(np.log(2))
    assert losses[1] != pytest.approx(losses[0])


@pytest.mark.nightly
def test_losses_may_be_added_and_ones_own(work: Path) -> None:
    (work / "own.py").write_text(
        "from torch.nn.functional import logsigmoid\n"
        "def mine(chosen, rejected, settings):\n"
        "    return -logsigmoid(chosen.rewards(settings) - rejected.rewards(settings))\n"
    )
    found = [
        done(work, *RUN, f"name=added{number}", f"method.loss={loss}")
        for number, loss in enumerate(
            ("{sigmoid: 0.5, nll: 0.25}", "{'own.py:mine': 0.5, nll: 0.25}")
        )
    ]
    near(load_model(found[1]), load_model(found[0]), 0.0)
    row = metrics(found[0])[-1]
    added = 0.5 * row["train/sigmoid_loss"] + 0.25 * row["train/nll_loss"]
    assert row["train/loss"] == pytest.approx(added, rel=1e-5)


def test_kto_learns_from_answers(work: Path) -> None:
    answers = done(work, *RUN, *KTO, "name=kto", "data.train=[answers.jsonl]", "steps=2")
    rows = metrics(answers)
    assert rows[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)  # r and z are 0
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(rows[1]["train/kl"]) > 1e-4
    assert rows[1]["train/loss"] != pytest.approx(0.5, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_streamed_kto_joins_what_a_step_has(work: Path, world: int) -> None:
    """A step of all rows joins what rows in memory join."""
    argv = [*RUN, *KTO, "data.train=[answers.jsonl]", f"batch.examples={len(ANSWERS)}", "steps=2"]
    argv += ["data.validation=[answers.jsonl]", "data.shuffle=false"]
    read = done(work, *argv, f"name=kto-read{world}")
    streamed = done(work, *argv, f"name=kto-streamed{world}", "data.streaming=1", world=world)
    for found, wanted in zip(metrics(streamed), metrics(read), strict=True):
        for name in ("train/loss", "train/kl", "val/loss", "val/kl"):
            assert found.get(name) == pytest.approx(wanted.get(name), abs=1e-5), name
    # Two ranks add gradients up in another order, and AdamW's first steps divide by small ones.
    near(load_model(streamed, 2), load_model(read, 2), 2e-5 if world == 1 else 3e-5)


@pytest.mark.nightly
def test_a_validation_of_kto_writes_its_answers(work: Path, other: Path) -> None:
    """Single answers, with β (r - z) of plain torch and their labels."""
    argv = ["data.train=[answers.jsonl]", "data.validation=[answers.jsonl]", "steps=2"]
    argv += [f"method.reference={other}", "batch.examples=16"]  # one batch has one z
    run = done(work, *RUN, *KTO, "name=kto-written", *argv)
    rows = written_rows(run, 2)
    assert len(rows) == len(ANSWERS)
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
        for each in (run / "checkpoints/step-00000002/model", other)
    )
    tokenizer = AutoTokenizer.from_pretrained(other)
    measured = metrics(run)[-1]
    for index, answer in enumerate(ANSWERS):
        with torch.no_grad():
            now, before = (
                log_likelihood(model, tokenizer, answer["prompt"], answer["completion"])
                for model in (policy, frozen)
            )
        row = rows[index, 0]
        lead = BETA * (float(now - before) - max(0.0, measured["val/kl"]))
        label = 1.0 if answer["label"] else -1.0
        assert row["completion"] == answer["completion"]
        assert row["reward"] == pytest.approx(lead, rel=1e-3, abs=1e-3)
        assert row["reward_parts"] == {"margin": label * row["reward"], "label": label}
    right = [row["reward_parts"]["margin"] > 0 for row in rows.values()]
    assert measured["val/accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.nightly
def test_kto_learns_from_pairs(work: Path) -> None:
    pairs = done(work, *RUN, *KTO, "name=kto-pairs", "steps=2", "data.validation=[pairs.jsonl]")
    assert metrics(pairs)[0]["val/loss"] == pytest.approx(0.5, abs=1e-6)
    written = written_rows(pairs, 2)
    assert written.keys() == {(index, sample) for index in range(len(PAIRS)) for sample in (0, 1)}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_a_ranked_list_trains_like_its_pairs(work: Path, kind: str) -> None:
    lists = [
        {"prompt": "1+1=", "completions": ["2", "3", "11"], "scores": [9.0, 1.0, 4.0]},
        {"prompt": "2+1=", "completions": ["4", "3"], "scores": [1.0, 2.0]},
    ]
    pairs = [
        {"prompt": p, "chosen": c, "rejected": r, "margin": m}
        for p, c, r, m in (
            ("1+1=", "2", "3", 4.0),
            ("1+1=", "2", "11", 2.5),
            ("1+1=", "11", "3", 1.5),
            ("2+1=", "3", "4", 0.5),
        )
    ]
    write_rows(work / "lists.jsonl", lists)
    write_rows(work / "margins.jsonl", pairs)
    argv = [
        kind,
        "dpo.yaml",
        "steps=2",
        "data.shuffle=true",
        *(["method={}"] if kind == "rm" else []),
    ]
    by_pair = done(work, *argv, f"name=margins-{kind}", "data.train=[margins.jsonl]")
    scores = ["method.margin_per_score=0.5", "data.train=[lists.jsonl]"]
    by_list = done(work, *argv, f"name=lists-{kind}", *scores)
    near(load_model(by_list, 2), load_model(by_pair, 2), 0.0)
    without = done(work, *argv, f"name=no-margins-{kind}", "data.train=[lists.jsonl]")
    assert metrics(without)[-1]["train/loss"] != pytest.approx(metrics(by_list)[-1]["train/loss"])


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["fsdp", "tp", "sp"])
def test_two_processes_do_what_one_does_with_kto(
    work: Path, other: Path, layout: str, tmp_path: Path
) -> None:
    argv = [*RUN, *KTO, "data.train=[answers.jsonl]", "data.validation=[pairs.jsonl]"]
    argv.append(f"method.reference={other}")
    one = done(work, *argv, f"name=kto-alone-{layout}")
    cache = {"BURNISH_CACHE": str(tmp_path)}
    two = done(work, *argv, f"name=kto-{layout}", *LAYOUTS[layout], world=2, environ=cache)
    assert_same(two, one)


@pytest.mark.nightly
def test_a_killed_run_of_kto_goes_on_to_the_bit(work: Path) -> None:
    argv = [*RUN, *KTO, "data.train=[answers.jsonl]", "checkpoint.save_every=1"]
    argv += ["model.lora.rank=4", "data.shuffle=true"]
    whole = done(work, *argv, "name=kto-whole")
    at = At("burnish.methods.parts.offline_training:make_batch", 5, signal.SIGKILL)
    (command,) = ranks(work, [*argv, "name=kto-killed"], 1, at=at)
    assert command.wait() != 0
    assert_same(done(work, *argv, "name=kto-killed"), whole)


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["method.loss={sigmiod: 1}"], ["sigmiod", "sigmoid"]),
        (["method.loss={}"], ["method.loss"]),
        (["method.loss={sigmoid: 0}"], ["method.loss", "0.0"]),
        (["method.reference=none"], ["method.reference", "simpo"]),
        (["method.reference=nowhere"], ["method.reference", "nowhere"]),
        (["method.beta=0"], ["method", "beta"]),
        (["data.train=[train.jsonl]"], ["chosen"]),
        (["data.train=[one-sided.jsonl]"], ["one-sided.jsonl", "rejected"]),
        (["data.train=[answers.jsonl]"], ["answers.jsonl", "kto"]),
        ([*KTO, "data.train=[unclear.jsonl]"], ["row 1", "'good'", "method.label_column"]),
        (["method.loss={kto: 1, nll: 1}"], ["nll", "kto"]),
        ([*KTO, "data.streaming=1", "batch.examples=1"], ["kto", "data.streaming"]),
        pytest.param(
            ["data.train=[ranked.jsonl]", "data.streaming=1"],
            ["ranked", "data.streaming"],
            marks=pytest.mark.nightly,
        ),
        ([*KTO, "method.length_normalized=true"], ["method.length_normalized"]),
    ],
)
def test_mistakes_end_before_anything_is_written(
    work: Path, argv: list[str], facts: list[str]
) -> None:
    write_rows(work / "one-sided.jsonl", [*PAIRS[:2], {"prompt": "1+1=", "chosen": "2"}])
    ranked = {"prompt": "1+1=", "completions": ["2", "3"], "scores": [2.0, 1.0]}
    write_rows(work / "ranked.jsonl", [ranked] * 4)
    write_rows(work / "unclear.jsonl", [ANSWERS[0], {**ANSWERS[1], "label": "good"}])
    code, output = burnish(work, *RUN, "name=wrong", *argv, "--dry-run")
    assert code in (2, 5), output
    said = output.partition("error: ")[2]
    assert [fact for fact in facts if fact not in said] == [], output
    assert "Traceback" not in output
    assert not (work / "runs/wrong").exists()
