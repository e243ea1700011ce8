"""PPO: a policy and a critic in one run, learned, saved and resumed together."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.checkpoints.states import committed
from support.models.tiny import save_base
from support.runs.training_files import At, burnish, done, metrics, outcome, weights
from transformers import AutoModelForTokenClassification

PPO = [
    *("rl", "rl.yaml", "algorithm.advantage=gae", "critic.lr=0.003", "critic.warmup_steps=2"),
    "batch.minibatches=2",
]
SAVING = ["checkpoint.save_every=1", "checkpoint.background=true"]


@pytest.fixture(scope="module")
def in_peace(work: Path) -> Path:
    return done(work, *PPO, "name=peace")


def newest(run: Path) -> Path:
    return committed(run / "checkpoints")[-1].path


@pytest.mark.nightly
def test_a_critic_learns_and_then_the_policy(work: Path) -> None:
    """The reward of four letters: a critic that sees some of them can know part of it, at most 3/8 of its variance."""
    many = ["batch.prompts=24", "batch.tokens_per_device=4096", "rollout.slots=96"]
    quiet = ["evaluation.every=0", "evaluation.before=false", "tracking.rollouts_every=0"]
    alone = ["critic.warmup_steps=12", "batch.minibatches=1", "steps=30"]
    rows = metrics(done(work, *PPO, "name=learns", *many, *quiet, *alone))
    explained = [row["critic/explained_var"] for row in rows]
    assert explained[0] < 0 < 0.06 < explained[11]
    assert [row["step"] for row in rows if "actor/loss" in row] == list(range(13, 31))
    rewards = [row["reward/mean"] for row in rows]
    waiting = sum(rewards[:12]) / 12
    assert max(rewards[:12]) < waiting + 0.1
    assert sum(rewards[-3:]) / 3 > waiting + 0.3
    state = json.loads((newest(work / "runs/learns") / "state.json").read_text())
    assert state["optimizer_steps"] == 18
    assert state["roles"] == {"critic": {"optimizer_steps": 30, "skipped_in_a_row": 0}}


def test_what_is_measured(in_peace: Path) -> None:
    row = metrics(in_peace)[-1]
    named = ("vf_loss", "vf_clipfrac", "values/mean", "returns/mean", "explained_var", "grad_norm")
    assert {f"critic/{name}" for name in (*named, "lr", "loss", "skipped")} <= row.keys()
    assert row["critic/lr"] == 0.003
    assert row["actor/lr"] == 0.01
    assert row["critic/returns/mean"] == pytest.approx(row["reward/mean"], rel=1e-4)


def test_in_the_warm_up_the_policy_neither_counts_nor_is_published(in_peace: Path) -> None:
    rows = [json.loads(line) for line in (in_peace / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/mfu" in row]
    assert [row["step"] for row in rows if "timing_s/publish" in row] == [3, 4, 5, 6]
    spent = [row["perf/mfu"] / row["perf/tokens_per_s"] for row in rows]  # operations per token
    assert max(spent[:2]) < 0.7 * min(spent[2:])
    versions = [
        {
            json.loads(line)["weights_version"]
            for line in gzip.decompress(path.read_bytes()).splitlines()
        }
        for path in sorted((in_peace / "rollouts").glob("step-*"))
    ]
    assert versions == [{0}, {0}, {0}, {3}, {4}, {5}]


def test_the_critic_on_disk_is_one_of_transformers_and_another_run_starts_from_it(
    work: Path, in_peace: Path
) -> None:
    directory = newest(in_peace) / "critic/model"
    loaded, info = AutoModelForTokenClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.score.out_features == 1
    frozen = [*PPO, "name=goes_on", f"critic.path={directory}", "critic.lr=0"]
    frozen += ["critic.warmup_steps=0", "steps=1"]
    again = load_file(newest(done(work, *frozen)) / "critic/model/model.safetensors")
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    "saving",
    [
        pytest.param([], id="in place"),
        pytest.param(SAVING, id="in the background", marks=pytest.mark.nightly),
    ],
)
def test_interrupted_equals_uninterrupted(work: Path, in_peace: Path, saving: list[str]) -> None:
    name = f"cut_{len(saving)}"
    argv = [*PPO, f"name={name}", *(saving or ["checkpoint.save_every=2"])]
    for place, nth in (
        ("burnish.methods.parts.critic:Critic.update", 6),
        ("burnish.engines.torch.torch_engine:TorchEngine.optim_step", 5),
        ("burnish.checkpoint.load:CheckpointSource.of", 2),
    ):
        code, output = burnish(work, *argv, at=At(place, nth, signal.SIGKILL))
        assert code == -signal.SIGKILL, output
    run = done(work, *argv)
    assert outcome(run) == outcome(in_peace)
    assert any("critic/" in name for name in outcome(run))


@pytest.mark.nightly
def test_stopped_by_a_signal_before_the_first_step_and_between_two_updates(
    work: Path, in_peace: Path
) -> None:
    argv = [*PPO, "name=stopped"]
    first = ("burnish.methods.parts.rollouts:Collector.collect", 1)
    for place, nth in (first, ("burnish.methods.parts.critic:Critic.update", 4)):
        code, output = burnish(work, *argv, at=At(place, nth, signal.SIGTERM))
        assert code == 128 + signal.SIGTERM, output
    assert outcome(done(work, *argv)) == outcome(in_peace)


@pytest.mark.nightly
def test_a_critic_as_an_adapter_is_one_of_peft_and_resumes(work: Path) -> None:
    save_base(work / "base", seed=0)
    argv = [*PPO, "model.fresh=null", "model.path=base", "critic.lora_rank=4", *SAVING]
    whole = done(work, *argv, "name=adapted")
    at = At("burnish.methods.parts.critic:Critic.update", 6, signal.SIGKILL)
    code, output = burnish(work, *argv, "name=adapted_cut", at=at)
    assert code == -signal.SIGKILL, output
    assert outcome(done(work, *argv, "name=adapted_cut")) == outcome(whole)
    shared = done(work, *argv, "engine.tensor_parallel=2", "name=adapted_tp", world=2)
    assert metrics(shared)[0] == pytest.approx(metrics(whole)[0], rel=1e-4, abs=1e-5)
    path = newest(whole) / "critic/model"
    saved = load_file(path / "adapter_model.safetensors")
    assert {name for name in saved if ".lora_" not in name} == {
        "base_model.model.score.weight",
        "base_model.model.score.bias",
    }
    base = AutoModelForTokenClassification.from_pretrained(work / "base", num_labels=1)
    loaded = PeftModel.from_pretrained(base, path).state_dict()
    for name, tensor in saved.items():
        place = "modules_to_save.default." if "score" in name else ""
        head, _, kind = name.rpartition(".")
        inner = f"{head}.{place}{kind}" if place else f"{head}.default.{kind}"
        assert torch.equal(loaded[inner], tensor), name
        assert tensor.abs().sum() > 0, name
    code, output = burnish(work, *argv, "name=adapted", "critic.lora_rank=2", "steps=7")
    assert (code, "critic.lora_rank" in output, "Traceback" in output) == (4, True, False), output


@pytest.mark.nightly
def test_a_checkpoint_without_a_critic_is_refused_and_stays_as_it_is(work: Path) -> None:
    run = done(work, "rl", "rl.yaml", "name=alone", "steps=2")
    recorded = run / "config.yaml"
    recorded.write_text(recorded.read_text().replace("name: grpo", "name: gae"))
    before = weights(run)
    argv = ["rl", "rl.yaml", "algorithm.advantage=gae", "name=alone", "steps=3"]
    code, output = burnish(work, *argv)
    assert code == 5, output
    assert "step-00000002" in output
    assert "critic/model" in output
    assert "critic/training" in output
    after = weights(run)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_algorithm_is_another_run(work: Path, in_peace: Path) -> None:
    code, output = burnish(work, "rl", "rl.yaml", "name=peace")
    assert code == 4
    assert "algorithm.advantage" in output
    assert "critic.lr" in output


def test_a_critic_is_no_policy(work: Path, in_peace: Path) -> None:
    directory = newest(in_peace) / "critic/model"
    argv = ["rl", "rl.yaml", "name=wrong", "model.fresh=null", f"model.path={directory}"]
    code, output = burnish(work, *argv)
    assert code == 4
    assert "critic.path" in output


def test_a_critic_with_another_vocabulary_is_refused(
    work: Path, in_peace: Path, tmp_path: Path
) -> None:
    shutil.copytree(newest(in_peace) / "critic/model", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    code, output = burnish(work, *PPO, "name=other", f"critic.path={tmp_path / 'other'}")
    assert code == 4, output
    assert "critic.path" in output
