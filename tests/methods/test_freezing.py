"""`model.train`: what trains is as plain torch trains it, the rest stays, in any layout, killed and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs.preferences import SETTINGS, load_model, near
from support.runs.same_runs import assert_same
from support.runs.training_files import At, burnish, done, make_files, ranks
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

RUN = ("sft", "part.yaml")
STEPS, ROWS = 4, 4
PATTERNS = ["mlp", r"layers\.1\.self_attn", "lm_head"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = make_files(tmp_path_factory.mktemp("part"))
    changes: dict[str, Any] = {
        "model": {**SETTINGS["model"], "train": PATTERNS},
        "data": {"train": ["train.jsonl"], "shuffle": False},
        "optim": {"lr": 0.01, "eps": 1e-5},
    }
    (work / "part.yaml").write_text(json.dumps({**SETTINGS, **changes, "method": {}}))
    return work


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    return done(work, *RUN, "name=alone")


@pytest.mark.nightly
def test_only_the_chosen_weights_learn(work: Path, alone: Path) -> None:
    first = done(work, *RUN, "name=start", "steps=1", "optim.lr=0") / "checkpoints"
    before = load_model(first.parent, 1)
    model = AutoModelForCausalLM.from_pretrained(first / "step-00000001/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(first / "step-00000001/model")
    tied = model.config.tie_word_embeddings
    chosen = {
        name: weight
        for name, weight in model.named_parameters()
        if "mlp" in name or "layers.1.self_attn" in name or (tied and "embed" in name) or "lm_head" in name
    }  # fmt: skip
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in chosen)
    optimizer = torch.optim.AdamW(chosen.values(), lr=0.01, eps=1e-5, weight_decay=0.0)
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for row in rows[ROWS * step : ROWS * step + ROWS]:
            head = tokenizer.encode(row["prompt"], add_special_tokens=False)
            tail = tokenizer.encode(row["completion"], add_special_tokens=False)
            ids = torch.tensor([*head, *tail, tokenizer.eos_token_id])
            logprobs = log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
            own = logprobs.gather(1, ids[1:, None])[len(head) - 1 :]
            total, count = total - own.sum(), count + len(own)
        (total / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(chosen.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = load_model(alone)
    near(after, model.state_dict(), 2e-5)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {*chosen}
    slots = (alone / "checkpoints" / f"step-{STEPS:08d}" / "training").iterdir()
    assert sum(path.stat().st_size for path in slots) < 3 * sum(w.numel() * 4 for w in model.parameters())  # fmt: skip


LAYOUTS = {
    "fsdp": [],
    "tp": ["engine.tensor_parallel=2"],
    "checkpointing": ["engine.activation_checkpointing=full"],
    "hsdp": ["engine.replicas=2"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_do_what_one_does(work: Path, alone: Path, layout: str) -> None:
    assert_same(done(work, *RUN, f"name={layout}", *LAYOUTS[layout], world=2), alone)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_killed_run_goes_on_to_the_bit(work: Path, kind: str) -> None:
    argv = [*RUN, "checkpoint.save_every=1", f"optim.kind={kind}"]
    whole = done(work, *argv, f"name=whole_{kind}")
    at = At("burnish.methods.parts.offline_training:make_batch", 4, signal.SIGKILL)
    (command,) = ranks(work, [*argv, f"name=killed_{kind}"], 1, at=at)
    assert command.wait() != 0
    assert_same(done(work, *argv, f"name=killed_{kind}"), whole)


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["model.train=[mpl]"], ["mpl", "mlp"]),
        (["engine.kind=megatron"], ["model.train", "engine.kind"]),
        (["model.lora.rank=2", "model.path=x"], ["model.train", "model.lora"]),
    ],
)
def test_mistakes_end_before_anything_is_written(
    work: Path, argv: list[str], facts: list[str]
) -> None:
    code, output = burnish(work, *RUN, "name=wrong", *argv, "--dry-run")
    assert code in (2, 4, 5), output
    said = output.partition("error: ")[2]
    assert [fact for fact in facts if fact not in said] == [], output
    assert "Traceback" not in output
    assert not (work / "runs/wrong").exists()
