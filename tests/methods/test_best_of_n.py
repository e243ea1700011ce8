"""`burnish rejection-sampling` and `online-dpo`: what they choose, against plain torch, in layouts, killed and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs.preferences import load_model, near
from support.runs.same_runs import assert_same
from support.runs.training_files import RL, At, burnish, done, make_files, metrics, ranks, rollouts
from torch.nn.functional import log_softmax, logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.api import load_config
from burnish.config.load import read_config
from burnish.methods.table import METHODS
from burnish.records import Completion, Prompt, Rollout
from burnish.records.rollout_table import RolloutTable

BETA, STEPS = 0.5, 3
METHOD = {"online-dpo": {"beta": BETA}, "rejection-sampling": {"keep": 2, "least_reward": 0.0}}


def table(rewards: list[list[float]], branches: bool = False) -> RolloutTable:
    ids = np.arange(3)
    numbers = np.zeros(3, np.float32)
    groups = []
    for index, group in enumerate(rewards):
        prompt = Prompt(index, ids, "", None, None, "", {})
        groups.append([])
        for sample, reward in enumerate(group):
            completion = Completion(ids, numbers, numbers, "stop", 0)
            for branch in range(1 + branches):
                rollout = Rollout(prompt, sample, completion, "", reward, branch=branch)
                groups[-1].append(rollout)
    return RolloutTable.of(groups)


def chosen(method: str, rollouts: RolloutTable, **settings: Any) -> list[int]:
    config = load_config({"method": settings})
    return np.flatnonzero(METHODS[method].select(config, rollouts).is_scored).tolist()  # type: ignore[attr-defined]


def test_the_best_and_the_worst_of_a_prompt_are_a_pair() -> None:
    rewards = [[0.0, 2.0, 1.0, 2.0], [1.0] * 4, [float("nan"), 3.0, float("nan"), 4.0], [float("nan")] * 4]  # fmt: skip
    assert chosen("online-dpo", table(rewards)) == [0, 3, 9, 11]


def test_the_best_of_a_prompt_are_kept() -> None:
    rewards = [[0.0, 2.0, 1.0, 2.0], [-1.0] * 4, [float("nan"), 3.0, float("nan"), 4.0]]
    assert chosen("rejection-sampling", table(rewards)) == [1, 4, 11]
    assert chosen("rejection-sampling", table(rewards), keep=2, least_reward=0) == [1, 3, 9, 11]
    assert chosen("rejection-sampling", table(rewards, branches=True)) == [2, 3, 8, 9, 22, 23]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = make_files(tmp_path_factory.mktemp("best"))
    settings = {
        **RL,
        "steps": STEPS,
        "data": {"train": ["train.jsonl"], "max_prompt_length": 8},
        "optim": {"lr": 0.01, "eps": 1e-5},
        "evaluation": {"every": 0},
        "checkpoint": {"model_dtype": "fp32"},
    }
    for method, own in METHOD.items():
        (work / f"{method}.yaml").write_text(json.dumps({**settings, "method": own}))
    return work


def by_torch(method: str, first: Path, run: Path) -> tuple[Any, list[float]]:
    """The weights and losses of training on a run's rollouts."""
    by_step = []
    model, frozen = (AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32) for _ in "ab")
    model.get_input_embeddings().padding_idx = None  # else a drawn pad token would not learn
    tokenizer = AutoTokenizer.from_pretrained(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.0)

    def logprobs(model: torch.nn.Module, row: dict[str, Any]) -> torch.Tensor:
        head = tokenizer.encode(row["prompt"], add_special_tokens=False)
        tail = tokenizer.convert_tokens_to_ids(row["tokens"]["texts"])
        ids = torch.tensor([*head, *tail])
        every = log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
        return every.gather(1, ids[1:, None])[len(head) - 1 :]

    for step in range(1, STEPS + 1):
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rollouts(run, step):
            groups.setdefault(row["prompt"], []).append(row)
        losses = []
        count = 0
        for group in groups.values():
            ranked = sorted(group, key=lambda row: (-row["reward"], row["sample"]))
            if method == "rejection-sampling":
                kept = [row for row in ranked if row["reward"] >= 0][:2]
                losses += [-logprobs(model, row).sum() for row in kept]
                count += sum(len(logprobs(frozen, row)) for row in kept)
            elif ranked[0]["reward"] > ranked[-1]["reward"]:
                last = max(row["sample"] for row in group if row["reward"] == ranked[0]["reward"])
                least = min(row["sample"] for row in group if row["reward"] == ranked[-1]["reward"])
                pair = [next(r for r in group if r["sample"] == s) for s in (last, least)]
                now = [logprobs(model, row).sum() for row in pair]
                with torch.no_grad():
                    before = [logprobs(frozen, row).sum() for row in pair]
                losses.append(-logsigmoid(BETA * (now[0] - before[0] - now[1] + before[1])))
                count += 1
        by_step.append(sum(float(loss.detach()) for loss in losses) / max(count, 1))
        if losses:
            (torch.stack(losses).sum() / count).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), by_step


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHOD)
def test_it_is_what_plain_torch_does_with_the_same_completions(work: Path, method: str) -> None:
    argv = [method, f"{method}.yaml"]
    first = done(work, *argv, f"name=first_{method}", "steps=1", "optim.lr=0")
    run = done(work, *argv, f"name=alone_{method}")
    wanted, losses = by_torch(method, first / "checkpoints/step-00000001/model", run)
    rows = [row for row in metrics(run) if "actor/loss" in row]
    np.testing.assert_allclose([row["actor/loss"] for row in rows], losses, rtol=1e-5)
    near(load_model(run, STEPS), wanted, 3e-5)
    if method == "online-dpo":
        assert rows[0]["actor/loss"] == pytest.approx(np.log(2), rel=1e-5)
        assert rows[-1]["actor/reward/chosen"] != 0
    assert_same(done(work, *argv, f"name=two_{method}", world=2), run)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("method", METHOD)
def test_a_killed_run_goes_on_to_the_bit(work: Path, method: str, world: int) -> None:
    argv = [method, f"{method}.yaml", "checkpoint.save_every=1"]
    whole = done(work, *argv, f"name=whole_{method}{world}", world=world)
    name = f"name=killed_{method}{world}"
    at = At("burnish.methods.parts.policy_update:make_batch", 2, signal.SIGKILL)
    commands = ranks(work, [*argv, name], world, at=at)
    assert all(command.wait() != 0 for command in commands)
    assert_same(done(work, *argv, name, world=world), whole)


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["online-dpo", "method.loss={kto: 1}"], ["kto", "sigmoid"]),
        (["online-dpo", "method.reference=none"], ["method.reference", "simpo"]),
        (["online-dpo", "rollout.n=1"], ["rollout.n"]),
        (["online-dpo", "algorithm.kl.coef=0.1"], ["algorithm.kl"]),
        (["online-dpo", "batch.tokens_per_device=20"], ["batch.tokens_per_device=24"]),
        (["rejection-sampling", "algorithm.advantage=gae"], ["algorithm.advantage"]),
        (["rejection-sampling", "method.kepe=2"], ["method.kepe", "keep"]),
    ],
)
def test_mistakes_are_named(work: Path, argv: list[str], facts: list[str]) -> None:
    method, *own = argv
    config = read_config(work / f"{method}.yaml", own)
    with pytest.raises(Exception, match=facts[0].replace(".", r"\.")) as raised:
        METHODS[method].check(config)
    assert [fact for fact in facts if fact not in str(raised.value)] == []


@pytest.mark.nightly
def test_a_dry_run_says_what_is_meant(work: Path) -> None:
    code, output = burnish(work, "online-dpo", "online-dpo.yaml", "--dry-run")
    assert code == 0, output
    assert "sigmoid, beta 0.5" in output
