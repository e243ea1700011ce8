"""Runs that train an adapter, through the real command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from support.checkpoints.states import committed, contents_of
from support.faults.bit_flips import flip
from support.models.tiny import save_base
from support.runs.training_files import (
    RL,
    SFT,
    burnish,
    done,
    metrics,
    outcome,
    weights,
    write_rows,
)
from transformers import AutoModelForCausalLM

from burnish.checkpoint.manager import Checkpoints
from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.files.safetensors import ADAPTER_PREFIX
from burnish.records import Example
from burnish.runs.setup import example_dataset, lay_foundation
from burnish.tracking.trackers import read_metrics

DROPOUT = "model.lora.dropout=0.1"
KL = {"algorithm": {"kl": {"coef": 0.1, "place": "reward"}}}


@pytest.fixture(scope="module")
def lora(work):
    """The directory, with a base model and two configurations that train an adapter on it."""
    save_base(work / "base", seed=0)
    for name, settings in (("sft", SFT), ("rl", {**RL, **KL})):
        model = {"path": "base", "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "up_proj"]}}
        (work / f"{name}-lora.yaml").write_text(json.dumps({**settings, "model": model}))
    return work


@pytest.fixture(scope="module")
def alone(lora):
    """A run of six steps on one process."""
    return done(lora, "sft", "sft-lora.yaml", "name=alone", DROPOUT)


@pytest.fixture(scope="module")
def first(lora):
    """A run of three steps, of which others begin."""
    return done(lora, "sft", "sft-lora.yaml", "name=first", "steps=3")


@pytest.mark.parametrize("trained", ["sft-lora.yaml", "sft.yaml"])
def test_ranks_wait_by_what_an_update_costs(lora, trained, monkeypatch):
    """Counted by hand: two or three times the products of weights, three times those of attention."""
    monkeypatch.chdir(lora)
    foundation = lay_foundation(RunConfig.model_validate(json.loads(Path(trained).read_text())))
    lengths = [2000, *range(100, 600, 70)]
    mask = {n: np.arange(n) > 0 for n in lengths}
    examples = [Example(np.full(n, i), mask[n]) for i, n in enumerate(lengths)]
    parts = [make_batch(examples, Layout(rank, 2), 4000, foundation.costs) for rank in range(2)]
    forward, products = foundation.flops.forward, foundation.flops.per_token
    times = 2 if foundation.adapter else 3
    loads = [
        sum(
            times * products * n + 3 * (forward([n]) - products * n)
            for n in (lengths[i] for micro in part.examples for i in micro)
        )
        for part in parts
    ]
    assert [len(part.examples) for part in parts] == [1, 1]
    assert parts[0].imbalance == pytest.approx(2 * max(loads) / sum(loads))
    whole = [forward(lengths[i] for i in part.examples[0]) for part in parts]
    apart = abs(parts[0].imbalance - 2 * max(whole) / sum(whole)) > 1e-3
    assert apart == bool(foundation.adapter)


@pytest.mark.nightly
def test_a_run_balances_by_what_its_update_costs(lora, monkeypatch):
    monkeypatch.chdir(lora)
    texts = ["1" * n for n in (1900, *range(100, 600, 70))]
    write_rows(lora / "long.jsonl", [{"text": text} for text in texts])
    settings = {"data.train": "[long.jsonl]", "data.shuffle": "false", "evaluation.every": 0}
    settings |= {"batch.examples": len(texts), "batch.tokens_per_device": 4000, "steps": 1}
    argv = [f"{name}={value}" for name, value in settings.items()]
    run = done(lora, "sft", "sft-lora.yaml", "name=long", *argv, world=2)
    config = read_config(Path("sft-lora.yaml"), argv)
    foundation = lay_foundation(config)
    dataset = example_dataset(foundation, config.data.train, "data.train")
    examples = [dataset[index] for index in range(len(texts))]
    expected, whole = (
        make_batch(examples, Layout(0, 2), 4000, costs).imbalance
        for costs in (foundation.costs, foundation.flops)
    )
    assert read_metrics(run / "metrics.jsonl")[-1]["perf/imbalance"] == pytest.approx(
        expected, rel=1e-9
    )
    assert abs(expected - whole) > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("modules", ["[lm_head]", "[embed_tokens, norm]"])
def test_layers_that_train_whole_resume_and_export(lora, modules):
    """On two processes, and of a tied model too. PEFT reads the step, and its merged model is the exported one."""
    for tied in (False, True):
        base = f"tied_{tied}"
        save_base(lora / base, seed=0, tie_word_embeddings=tied)
        argv = [
            "sft",
            "sft-lora.yaml",
            f"model.lora.modules_to_save={modules}",
            f"model.path={base}",
        ]
        name = f"{base}{len(modules)}"
        peace = done(lora, *argv, f"name={name}", world=2)
        done(lora, *argv, f"name={name}_war", "steps=3", world=2)
        assert outcome(done(lora, *argv, f"name={name}_war", world=2)) == outcome(peace)
        step = peace / "checkpoints/step-00000006"
        places = {"alone": [], "whole": ["--merged"]}
        for kind, words in places.items():
            to = f"{name}-{kind}"
            assert burnish(lora, "ckpt", "export", str(step), to, "--dtype", "fp32", *words)[0] == 0
        whole, plain = (
            AutoModelForCausalLM.from_pretrained(lora / path, dtype=torch.float32).eval()
            for path in (f"{name}-whole", base)
        )
        assert whole.config.tie_word_embeddings == tied
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            before = plain(ids).logits
            wanted = PeftModel.from_pretrained(plain, lora / f"{name}-alone").eval()(ids).logits
            torch.testing.assert_close(whole(ids).logits, wanted, rtol=0, atol=2e-5)
        assert (before - wanted).abs().max() > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_magnitudes_resume_and_export(lora, tied):
    """On two processes. PEFT reads the step, and its merged model is the exported one; another run goes on from it."""
    base, name = f"dora_{tied}", f"magnitudes_{tied}"
    save_base(lora / base, seed=0, tie_word_embeddings=tied)
    argv = ["sft", "sft-lora.yaml", "model.lora.dora=true", f"model.path={base}"]
    peace = done(lora, *argv, f"name={name}", world=2)
    done(lora, *argv, f"name={name}_war", "steps=3", world=2)
    assert outcome(done(lora, *argv, f"name={name}_war", world=2)) == outcome(peace)
    step = peace / "checkpoints/step-00000006"
    for kind, words in {"alone": [], "whole": ["--merged"]}.items():
        to = f"{name}-{kind}"
        assert burnish(lora, "ckpt", "export", str(step), to, "--dtype", "fp32", *words)[0] == 0
    whole, plain = (
        AutoModelForCausalLM.from_pretrained(lora / path, dtype=torch.float32).eval()
        for path in (f"{name}-whole", base)
    )
    assert PeftConfig.from_pretrained(lora / f"{name}-alone").use_dora
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, lora / f"{name}-alone").eval()
        wanted = adapted(ids).logits
        torch.testing.assert_close(whole(ids).logits, wanted, rtol=0, atol=2e-5)
        merged = adapted.merge_and_unload()(ids).logits
        torch.testing.assert_close(whole(ids).logits, merged, rtol=0, atol=2e-5)
    assert (before - wanted).abs().max() > 1e-3
    if not tied:  # it begins as the model, and so with the loss of an adapter without magnitudes
        first = done(lora, "sft", "sft-lora.yaml", f"model.path={base}", "name=without", "steps=1")
        losses = [metrics(run)[1]["train/loss"] for run in (peace, first)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    begins = ["model.fresh=null", "model.tokenizer=null", f"model.path={base}"]
    argv = ["sft", "sft.yaml", f"name={name}_on", *begins, f"model.lora.path={name}-alone"]
    on = done(lora, *argv, "optim.lr=0", "steps=1")
    saved = load_file(on / "checkpoints/step-00000001/model/adapter_model.safetensors")
    given = load_file(lora / f"{name}-alone/adapter_model.safetensors")
    assert {key.rpartition(".")[2] for key in saved} == {"weight", "lora_magnitude_vector"}
    for key, tensor in given.items():
        torch.testing.assert_close(saved[key].float(), tensor, rtol=2**-8, atol=0)


def test_interrupted_equals_uninterrupted(lora, alone):
    require_same_when_interrupted(lora, ["sft", "sft-lora.yaml", DROPOUT], "sft", alone)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("publish=merged", marks=pytest.mark.nightly),
        pytest.param("publish=adapter", marks=pytest.mark.nightly),
        pytest.param("modules_to_save=[embed_tokens, norm]", marks=pytest.mark.nightly),
        pytest.param("dora=true", marks=pytest.mark.nightly),
    ],
)
def test_interrupted_reinforcement_learning_equals_uninterrupted(lora, setting):
    """The guard compares the generator's log-probs with the trainer's."""
    argv = ["rl", "rl-lora.yaml", f"model.lora.{setting}", "batch.minibatches=2"]
    argv += ["rollout.check_every=1"] if "dora" in setting else [DROPOUT]
    name = setting.partition("=")[0] + setting[-7:].strip("], ")
    peace = done(lora, *argv, f"name={name}_peace")
    require_same_when_interrupted(lora, argv, name, peace)


@pytest.mark.nightly
def test_beside_the_model_in_another_process_it_draws_the_same(lora):
    """The guard compares every version, tensor by tensor where log-probs differ."""
    argv = ["rl", "rl-lora.yaml", "model.lora.publish=adapter", "rollout.check_every=1"]
    inside = done(lora, *argv, "name=beside_inside")
    outside = done(lora, *argv, "name=beside_outside", "rollout.place=child", world=2)
    inside_on_two = done(lora, *argv, "name=beside_inside_2", world=2)
    assert outcome(outside) == outcome(inside_on_two)
    assert outcome(inside).keys() == outcome(outside).keys()


def require_same_when_interrupted(lora, argv, name, uninterrupted):
    peace = outcome(uninterrupted)
    done(lora, *argv, f"name={name}_war", "steps=3")
    assert outcome(done(lora, *argv, f"name={name}_war")) == peace
    assert {name for name in peace if name.endswith(".safetensors")} == {
        f"checkpoints/step-00000006/{name}.safetensors"
        for name in (
            "model/adapter_model",
            "training/residual",
            "training/exp_avg",
            "training/exp_avg_sq",
        )
    }


@pytest.mark.nightly
def test_the_kl_to_the_model_without_it_begins_at_zero(lora):
    run = done(lora, "rl", "rl-lora.yaml", "name=kl", "algorithm.kl.place=loss", "steps=3")
    kl = [row["actor/kl_loss"] for row in metrics(run) if row["step"]]
    assert kl[0] == 0
    assert kl[2] > 0


@pytest.mark.nightly
def test_on_other_numbers_of_processes_it_continues(lora, alone):
    done(lora, "sft", "sft-lora.yaml", "name=grown", DROPOUT, "steps=3")
    require_same_moments(done(lora, "sft", "sft-lora.yaml", "name=grown", DROPOUT, world=2), alone)


def test_peft_reads_its_dropout_and_a_run_goes_on_with_its_own(lora, alone):
    step = alone / "checkpoints/step-00000006"
    assert PeftConfig.from_pretrained(step / "model").lora_dropout == 0.1
    kept = metrics(alone)[-1]["val/loss"]
    code, output = burnish(lora, "eval", "runs/alone")
    assert code == 0, output
    assert float(output.split()[-1]) == pytest.approx(kept, rel=1e-5)
    code, output = burnish(lora, "sft", "sft-lora.yaml", "name=alone", "steps=7")
    assert (code, "model.lora.dropout" in output) == (4, True), output


def require_same_moments(run, other):
    found, wanted = weights(run), weights(other)
    assert found.keys() == wanted.keys()
    moments = [name for name in wanted if "/exp_avg" in name]
    assert moments
    for name in moments:
        assert (found[name] - wanted[name]).norm() <= 1e-3 * wanted[name].norm(), name


@pytest.mark.nightly
def test_experts_continue_on_more_processes_and_are_pefts(lora):
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    save_base(lora / "mixture", 0, **mixture)
    targets = "model.lora.targets=[v_proj,experts.gate_up_proj,experts.down_proj]"
    argv = ["sft", "sft-lora.yaml", "model.path=mixture", targets]
    alone = done(lora, *argv, "name=mixed")
    done(lora, *argv, "name=mixed_grown", "steps=3")
    run = done(lora, *argv, "name=mixed_grown", world=2)
    require_same_moments(run, alone)
    code, output = burnish(lora, "ckpt", "export", "runs/mixed_grown", "merged_mixture", "--merged", "--dtype", "fp32")  # fmt: skip
    assert code == 0, output
    base = AutoModelForCausalLM.from_pretrained(lora / "mixture", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, run / "checkpoints/step-00000006/model").eval()
    merged = AutoModelForCausalLM.from_pretrained(lora / "merged_mixture", dtype=torch.float32)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        wanted, found = loaded(ids).logits, merged.eval()(ids).logits
        with loaded.disable_adapter():
            off = loaded(ids).logits
    assert (off - wanted).norm() > 0.1 * wanted.norm()
    # The adapter is in bf16, what is merged is exact.
    assert (found - wanted).norm() <= 1e-2 * wanted.norm()


def test_what_it_learned_is_in_pefts_adapter_and_in_the_merged_model(lora):
    url = f"file://{lora}/base"
    run = done(lora, "sft", "sft-lora.yaml", "name=learned", f"model.path={url}")
    adapter = json.loads((run / "checkpoints/step-00000006/model/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == url
    code, output = burnish(lora, "eval", "runs/learned")
    assert code == 0, output
    loss = metrics(run)[-1]["val/loss"]
    assert float(output.split()[-1]) == pytest.approx(loss, rel=1e-5)
    code, output = burnish(lora, "ckpt", "export", "runs/learned", "merged", "--merged", "--dtype", "fp32")  # fmt: skip
    assert code == 0, output
    merged = done(
        lora, "sft", "sft.yaml", "name=merged", "steps=1", "model.path=merged", "model.fresh=null"
    )
    assert metrics(merged)[0]["val/loss"] == pytest.approx(loss, rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(lora / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, run / "checkpoints/step-00000006/model")
    plain = AutoModelForCausalLM.from_pretrained(lora / "merged", dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, plain(ids).logits, atol=0.02)  # bf16
        with loaded.disable_adapter():
            assert not torch.allclose(loaded(ids).logits, plain(ids).logits, atol=0.02)
    code, output = burnish(lora, "sft", "sft.yaml", "name=x", f"model.path={run}/checkpoints/step-00000006/model", "model.fresh=null")  # fmt: skip
    assert code == 5, output
    assert "burnish ckpt export" in output


@pytest.mark.nightly
def test_another_run_goes_on_from_it(lora, first):
    step = committed(first / "checkpoints")[-1].path
    base = ["sft", "sft.yaml", "model.path=base", "model.fresh=null"]
    start = [*base, f"model.lora.path={step}/model"]
    for name, world, layout in (("next", 1, ()), ("shared", 2, ["engine.tensor_parallel=2"])):
        run = done(lora, *start, f"name={name}", "optim.lr=0", "steps=1", *layout, world=world)
        before = metrics(run)[0]["val/loss"]
        assert before == pytest.approx(metrics(first)[-1]["val/loss"], abs=2e-3)  # bf16 on disk
        again = committed(run / "checkpoints")[-1].path
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (again / "model" / file).read_bytes() == (step / "model" / file).read_bytes()
    peace = outcome(done(lora, *start, "name=went_on"))
    done(lora, *start, "name=went_on_later", "steps=3")
    assert outcome(done(lora, *start, "name=went_on_later")) == peace
    save_base(lora / "other", seed=1)
    code, output = burnish(lora, *start, "name=wrong", "model.path=other")
    assert (code, "model.path" in output) == (4, True), output
    code, output = burnish(lora, *start, "name=plan", "--dry-run")
    assert code == 0, output
    assert f"from the adapter {step}/model" in output
    code, output = burnish(lora, *start, "name=plan", "model.lora.path=nowhere", "--dry-run")
    assert (code, "model.lora.path: " in output) == (5, True), output


@pytest.mark.nightly
def test_the_kl_to_the_adapter_that_it_starts_from_begins_at_zero(lora, first):
    start = [
        "rl",
        "rl.yaml",
        "model.path=base",
        "model.fresh=null",
        "engine.offload_during_rollout=true",
    ]
    start += [f"model.lora.path={committed(first / 'checkpoints')[-1].path}/model"]
    start += ["algorithm.kl.coef=0.1", "engine.precision=bf16", "steps=3"]
    start += ["data.validation=[]", "evaluation.every=0"]  # the last step of a run has its own
    peace = done(lora, *start, "name=kl_peace")
    kl = [row["actor/kl_loss"] for row in metrics(peace) if row["step"]]
    assert kl[0] == 0
    assert kl[2] > 0
    done(lora, *start, "name=kl_war", "steps=1")
    assert outcome(done(lora, *start, "name=kl_war")) == outcome(peace)


@pytest.mark.nightly
def test_what_it_started_from_is_read_whole_and_only_resuming_needs_it_again(lora):
    first = done(lora, "sft", "sft-lora.yaml", "name=origin", "steps=1")
    adapter = committed(first / "checkpoints")[-1].path / "model"
    argv = ["sft", "sft.yaml", "model.path=base", "model.fresh=null", f"model.lora.path={adapter}"]
    run = done(lora, *argv, "name=heir", "steps=3")
    file = adapter / "adapter_model.safetensors"
    flip(file)
    code, output = burnish(lora, *argv, "name=damaged", "steps=1")
    assert (code, "model/adapter_model.safetensors" in output) == (3, True), output
    shutil.rmtree(first)
    code, output = burnish(lora, "eval", "runs/heir")
    assert code == 0, output
    assert float(output.split()[-1]) == pytest.approx(metrics(run)[-1]["val/loss"], rel=1e-5)
    code, output = burnish(lora, *argv, "name=heir", "steps=4")
    assert (code, "model.lora.path: " in output) == (5, True), output


@pytest.mark.nightly
def test_a_base_in_a_step_is_looked_at_again_wherever_it_is_read_again(lora):
    """Under an adapter that resumes or is evaluated, and as what the KL is to."""
    first = done(lora, "sft", "sft.yaml", "name=ground", "steps=1")
    base = committed(first / "checkpoints")[-1].path / "model"
    upon = ["sft", "sft-lora.yaml", "name=upon", f"model.path={base}"]
    held = ["rl", "rl.yaml", "name=held", "algorithm.kl.coef=0.1", "evaluation.every=0"]
    held += [f"model.path={base}", "model.fresh=null"]
    for argv in (upon, held):
        done(lora, *argv, "steps=1")
    file = base / "model.safetensors"
    flip(file)
    for argv in ([*upon, "steps=2"], ["eval", "runs/upon"], [*held, "steps=2"]):
        code, output = burnish(lora, *argv)
        assert (code, str(file) in output) == (3, True), output


@pytest.mark.nightly
def test_another_adapter_is_refused(lora):
    run = done(lora, "sft", "sft-lora.yaml", "name=mine", "steps=1")
    code, output = burnish(lora, "sft", "sft-lora.yaml", "name=mine", "model.lora.rank=8")
    assert code == 4, output
    assert ["model.lora.rank", "4", "8"] in [line.split() for line in output.splitlines()]
    (run / "config.yaml").unlink()  # the checkpoint knows it too
    argv = ["sft", "sft-lora.yaml", "name=mine", "steps=2", "model.lora.targets=[k_proj]"]
    code, output = burnish(lora, *argv, "model.lora.rank=2")
    assert code == 4, output
    rows = [line.split() for line in output.splitlines()]
    assert ["rank", "4", "2"] in rows
    assert ["targets", "['q_proj',", "'up_proj']", "['k_proj']"] in rows
    (run / "config.yaml").unlink()
    whole = ["model.path=base", "model.fresh=null", "model.tokenizer=null"]
    code, output = burnish(lora, "sft", "sft.yaml", "name=mine", "steps=2", *whole)
    assert (code, "have: an adapter" in output) == (4, True), output
    (run / "config.yaml").unlink()
    file = run / "checkpoints/step-00000001/model/adapter_model.safetensors"
    flip(file)
    code, output = burnish(lora, "sft", "sft-lora.yaml", "name=mine", "steps=2")
    assert (code, "model/adapter_model.safetensors" in output) == (3, True), output
    assert f"{ADAPTER_PREFIX}model.layers." in output


def test_another_model_in_the_place_of_the_adapters_is_refused(lora):
    shutil.copytree(lora / "base", lora / "changing")
    argv = ["sft", "sft-lora.yaml", "name=changed", "model.path=changing"]
    done(lora, *argv, "steps=1")
    save_base(lora / "changing", seed=1)
    for command in (argv, ["eval", "runs/changed"]):
        code, output = burnish(lora, *command)
        assert code == 4, output
        assert "base_digest" in output
        assert "\nstep " not in output


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ("one is missing", 5),
        pytest.param("one is too much", 4, marks=pytest.mark.nightly),
    ],
)
def test_an_adapter_with_other_keys_is_refused(lora, change, status):
    name = change.replace(" ", "_")
    run = done(lora, "sft", "sft-lora.yaml", f"name={name}", "steps=1")
    step = committed(run / "checkpoints")[0]
    tensors = load_file(step.path / "model/adapter_model.safetensors")
    slots = {
        f"{slot}/{key}": tensor
        for slot in ("exp_avg", "exp_avg_sq")
        for key, tensor in load_file(step.path / f"training/{slot}.safetensors").items()
    }
    key = f"{ADAPTER_PREFIX}model.layers.1.self_attn.{'q' if change == 'one is missing' else 'v'}_proj.lora_A.weight"
    if change == "one is missing":
        del tensors[key]
    else:
        tensors[key] = torch.zeros(4, 32)
    shutil.rmtree(step.path)
    contents = contents_of({k: t.float() for k, t in tensors.items()}, slots, state=step.state)
    with Checkpoints(run / "checkpoints", Layout()) as checkpoints:
        checkpoints.save(1, contents)
    code, output = burnish(lora, "sft", "sft-lora.yaml", f"name={name}", "steps=2")
    assert code == status, output
    assert key in output
