"""What a run does with its checkpoints, through the real command."""

from __future__ import annotations

import math
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.states import committed, contents_of, make_state
from support.faults.bit_flips import flip
from support.nightly import by_day
from support.runs.training_files import FRESH, At, burnish, done, metrics, outcome
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import open_step
from burnish.checkpoint.tools.export import StepModel, export
from burnish.config.load import read_config
from burnish.config.resume import digest
from burnish.distributed.layout import Layout
from burnish.files.storage import LocalStorage


@pytest.mark.parametrize("mode", by_day(["min", "max"], ["max"]))
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
    digests = {step.state["config_digest"] for step in steps}
    assert digests == {digest(read_config(run / "config.yaml"))}
    assert [step.state["weights_version"] for step in steps] == [step.step for step in steps]


def test_a_signal_in_the_validation_of_the_best_step_does_not_lose_it(work):
    argv = [
        "sft", "sft.yaml", "steps=12", "evaluation.every=3", "checkpoint.save_every=3",
        "checkpoint.keep_last=1", "checkpoint.keep_best={metric: val/loss, mode: max}",
    ]  # fmt: skip
    whole = done(work, *argv, "name=kept_whole")
    in_validation = At("burnish.runs.run:Run._throughput", 3, signal.SIGTERM)
    code, output = burnish(work, *argv, "name=kept_cut", at=in_validation)
    assert code == 128 + signal.SIGTERM, output
    cut = done(work, *argv, "name=kept_cut")
    steps = [[step.step for step in committed(run / "checkpoints")] for run in (whole, cut)]
    assert steps == [[3, 12]] * 2
    assert metrics(cut) == metrics(whole)


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(work):
    code, output = burnish(
        work, "sft", "sft.yaml", "name=unmeasured", "checkpoint.keep_best={metric: val/los, mode: min}"
    )  # fmt: skip
    assert code == 2, output
    assert "val/los\n" in output or "val/los " in output
    assert "val/loss" in output
    assert "\nstep " not in output


def test_a_step_that_other_settings_made_is_told(work):
    """As one that somebody put into the directory of another run."""
    first = done(work, "sft", "sft.yaml", "name=first_settings", "steps=1")
    argv = ["sft", "sft.yaml", "name=other_settings", "optim.lr=0.25", "steps=1"]
    second = done(work, *argv)
    shutil.rmtree(second / "checkpoints")
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    code, output = burnish(work, *argv)
    assert code == 0, output
    assert "was saved: the settings that decide the outcome" in output
    assert "step 1 of 1 is done already: nothing is left to do" in output


@pytest.mark.nightly
def test_a_model_in_fp32_has_no_residual_and_either_kind_goes_on_as_the_other(work):
    """The weights are the same bits, whether `model/` has them or it and its residual."""
    split = done(work, "sft", "sft.yaml", "name=in_bf16", "checkpoint.background=true")
    argv = ["sft", "sft.yaml", "name=in_fp32", "checkpoint.model_dtype=fp32"]
    done(work, *argv, "steps=3")
    whole = done(work, *argv, "checkpoint.background=true")
    assert not (step_of(whole) / "training/residual.safetensors").exists()
    step = StepModel(open_step(step_of(split)))
    export(step, work / "exported", torch.float32, 1 << 30)
    found, exported = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (step_of(whole) / "model", work / "exported")
    )
    assert found.dtype == torch.float32
    expected = exported.state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in found.state_dict().items())
    done(work, "sft", "sft.yaml", "name=in_fp32", "steps=7")
    done(work, "sft", "sft.yaml", "name=in_bf16", "steps=7", "checkpoint.model_dtype=fp32")
    assert (step_of(whole) / "training/residual.safetensors").exists()
    assert not (step_of(split) / "training/residual.safetensors").exists()


def step_of(run):
    """The newest."""
    return committed(run / "checkpoints")[-1].path


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_older(work):
    argv = ["sft", "sft.yaml", "name=damaged", "checkpoint.save_every=2", "checkpoint.keep_last=9"]
    peace = outcome(done(work, *argv))
    checkpoints = work / "runs/damaged/checkpoints"
    flip(checkpoints / "step-00000006/training/exp_avg.safetensors")
    code, output = burnish(work, *argv)
    assert code == 0, output
    assert "moved to runs/damaged/checkpoints/quarantine/step-00000006" in output
    assert "exp_avg.safetensors" in output
    assert " model." in output  # the tensors by name
    assert "resuming step 4 from runs/damaged/checkpoints/step-00000004" in output
    assert outcome(work / "runs/damaged") == peace


@pytest.mark.nightly
def test_with_checkpoints_that_are_all_damaged_no_run_begins_anew(work):
    argv = ["sft", "sft.yaml", "name=ruined", "checkpoint.save_every=3", "checkpoint.keep_last=9"]
    checkpoints = done(work, *argv) / "checkpoints"
    for step in (3, 6):
        flip(checkpoints / f"step-0000000{step}/training/exp_avg.safetensors")
    for _ in range(2):
        code, output = burnish(work, *argv)
        assert code == 3, output
        assert "runs/ruined/checkpoints" in output
        assert "\nstep " not in output
        assert sorted(each.name for each in (checkpoints / "quarantine").iterdir()) == [
            "step-00000003",
            "step-00000006",
        ]


def test_a_state_of_another_trainer_is_refused_before_anything_is_loaded(work):
    argv = ["sft", "sft.yaml", "name=another_state", "steps=1"]
    root = done(work, *argv) / "checkpoints"
    shutil.rmtree(root / "step-00000001")
    state = {"step": 1, "epoch_of_the_moon": 3}
    with Checkpoints(root, Layout()) as checkpoints:
        checkpoints.save(1, contents_of(*make_state(1), state=state))
    code, output = burnish(work, *argv)
    assert code == 4, output
    assert "epoch_of_the_moon" in output
    assert (root / "step-00000001").is_dir()


def test_steps_that_are_not_finite_are_marked_evict_nothing_and_are_not_continued(work):
    argv = [
        "sft", "sft.yaml", "name=diverged", "optim.lr=1e39", "engine.max_skipped_steps=100",
        "checkpoint.save_every=1", "checkpoint.keep_last=1",
    ]  # fmt: skip
    run = done(work, *argv)
    losses = {row["step"]: row.get("train/loss") for row in metrics(run)}
    assert math.isnan(losses[2])
    healthy = {step.step: step.healthy for step in committed(run / "checkpoints")}
    assert healthy == dict.fromkeys(range(1, 7), False)
    code, output = burnish(work, *argv)
    assert code == 3, output
    assert "step-00000006" in output


def test_what_a_family_keeps_in_fp32_is_in_the_model_as_it_is(work):
    """Biases of routers that differ by less than bf16 tells apart, as trained ones do."""
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=FRESH["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
        bos_token_id=None, eos_token_id=FRESH["eos_token_id"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    name, bias = next((n, b) for n, b in model.named_buffers() if "e_score" in n)
    bias.copy_(13 + torch.arange(8) / 100)
    model.save_pretrained(work / "routed")
    run = done(
        work, "sft", "sft.yaml", "name=keeps_fp32", "steps=1", "model.fresh=null", "model.path=routed"
    )  # fmt: skip
    step = committed(run / "checkpoints")[-1]
    stored = load_file(step.path / "model/model.safetensors")
    assert torch.equal(stored.pop(name), bias)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    export(StepModel(step), work / "routed_bf16", torch.bfloat16, 1 << 40, LocalStorage())
    assert torch.equal(load_file(work / "routed_bf16/model.safetensors")[name], bias)
