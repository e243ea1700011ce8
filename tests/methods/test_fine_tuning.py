"""`burnish sft` with weights of rows and turns and with other losses, against plain torch; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tokenizers import CHATML, char_tokenizer
from support.runs.preferences import SETTINGS, load_model, near
from support.runs.same_runs import assert_same
from support.runs.training_files import burnish, done, make_files, metrics, write_rows
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_pt_utils import LabelSmoother

STEPS, ROWS = 4, 4
RUN = ("sft", "weighted.yaml")
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+1="},
            {"role": "assistant", "content": str(a + 1), **({"weight": 0.25} if a % 2 else {})},
            {"role": "user", "content": f"{a}+2="},
            {"role": "assistant", "content": str(a + 2), "weight": a % 3},
        ],
        "importance": 0.5 + a % 4,
    }
    for a in range(8)
] + [
    {"messages": [{"role": "user", "content": "0+0="}, {"role": "assistant", "content": "0"}], "importance": 1}
] * 8  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = make_files(tmp_path_factory.mktemp("weighted"))
    char_tokenizer(CHATML).save_pretrained(work / "tokenizer")
    write_rows(work / "chats.jsonl", CHATS)
    changes: dict[str, Any] = {
        "data": {"train": ["chats.jsonl"], "shuffle": False},
        "batch": {"examples": ROWS, "tokens_per_device": 256},
        "method": {"loss": "dft", "weight_column": "importance"},
        "optim": {"lr": 0.01, "eps": 1e-5},
    }
    (work / "weighted.yaml").write_text(json.dumps({**SETTINGS, **changes}))
    return work


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    return done(work, *RUN, "name=alone")


def pieces(messages: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """A conversation in ChatML, cut into texts with the weights of their tokens."""
    parts = []
    for message in messages:
        weight = message.get("weight", 1.0) if message["role"] == "assistant" else 0.0
        parts.append((f"<|im_start|>{message['role']}\n", 0.0))
        parts += [(f"{message['content']}<|im_end|>", float(weight)), ("\n", 0.0)]
    return parts


@pytest.mark.nightly
def test_losses_of_rows_and_turns_have_their_weights(work: Path, alone: Path) -> None:
    first = done(work, *RUN, "name=start", "steps=1", "optim.lr=0")
    start = first / "checkpoints/step-00000001/model"
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        count = 0
        for row in CHATS[ROWS * step : ROWS * step + ROWS]:
            ids, weights = list[int](), list[float]()
            for text, weight in pieces(row["messages"]):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                ids += tokens
                weights += [weight] * len(tokens)
            row_ids = torch.tensor(ids)
            logprobs = log_softmax(model(row_ids[None]).logits[0, :-1].float(), dim=-1)
            logprobs = logprobs.gather(1, row_ids[1:, None])[:, 0]
            factors = torch.tensor(weights[1:])
            token_losses = -logprobs.detach().exp() * logprobs
            total = total + row["importance"] * (factors * token_losses).sum()
            count += int((factors > 0).sum())
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    trained = [row["train/loss"] for row in metrics(alone) if "train/loss" in row]
    np.testing.assert_allclose(trained, losses, rtol=1e-5)
    near(load_model(alone), model.state_dict(), 2e-5)


@pytest.mark.nightly
def test_labels_are_smoothed_as_transformers_does(work: Path) -> None:
    """A step takes whole rows, so the trainer's mean over tokens is that of the step."""
    texts = [f"{a}+{a}={2 * a}" for a in range(4)]
    write_rows(work / "texts.jsonl", [{"text": text} for text in texts])
    smoothed = ["data.train=[texts.jsonl]", "method={label_smoothing: 0.2}", "optim.lr=0.01"]
    run = done(work, *RUN, "name=smoothed", "steps=1", *smoothed)
    for layout, settings in LAYOUTS.items():
        name = f"name=smoothed-{layout}"
        assert_same(done(work, *RUN, name, "steps=1", *smoothed, *settings, world=2), run)
    begun = done(work, *RUN, "name=unsmoothed", "steps=1", *smoothed, "optim.lr=0")
    start = begun / "checkpoints/step-00000001/model"
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    rows = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.0)
    output = model(ids)
    loss = LabelSmoother(0.2)(output, labels, shift_labels=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    (row,) = [row for row in metrics(run) if "train/loss" in row]
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    plain = LabelSmoother(0.0)(output, labels, shift_labels=True)
    assert row["train/nll"] == pytest.approx(plain.item(), rel=1e-5)
    near(load_model(run, 1), model.state_dict(), 2e-5)


LAYOUTS = {
    "fsdp": [],
    "tp": ["engine.tensor_parallel=2"],
    "sp": ["engine.sequence_parallel=2"],
    "small": ["batch.tokens_per_device=96"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_do_what_one_does(work: Path, alone: Path, layout: str) -> None:
    assert_same(done(work, *RUN, f"name={layout}", *LAYOUTS[layout], world=2), alone)


@pytest.mark.nightly
def test_a_run_goes_on_with_the_function_that_it_began_with(work: Path) -> None:
    file = work / "losses.py"
    file.write_text("def mine(logprobs, micro):\n    return -logprobs\n")
    argv = [*RUN, "name=own", "method.loss=losses.py:mine"]
    plain = done(work, *RUN, "name=plain", "method.loss=nll")
    assert metrics(plain)[-1]["train/loss"] != metrics(done(work, *RUN, "name=dft"))[-1]["train/loss"]  # fmt: skip
    done(work, *argv, "steps=2")
    near(load_model(done(work, *argv)), load_model(plain), 0.0)
    file.write_text("def mine(logprobs, micro):\n    return -2 * logprobs\n")
    code, output = burnish(work, *argv, "steps=5")
    assert code != 0
    assert "formula" in output


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["method.loss=dtf"], ["method.loss", "dft"]),
        (["method.label_smoothing=0.1"], ["method.label_smoothing", "method.loss: dft"]),
        (["method.weight_column=imprtance"], ["method.weight_column", "imprtance"]),
        (["method.weight_column=messages"], ["row 0", "chats.jsonl", "messages"]),
    ],
)
def test_mistakes_end_before_anything_is_written(
    work: Path, argv: list[str], facts: list[str]
) -> None:
    code, output = burnish(work, *RUN, "name=wrong", *argv, "--dry-run")
    assert code in (2, 5), output
    said = output.partition("error: ")[2]
    assert [fact for fact in facts if fact not in said] == [], output
    assert "Traceback" not in output
    assert not (work / "runs/wrong").exists()
