"""`model.train_mtp`: runs train layers for multi-token prediction, save and resume them, and engines that do not train them keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from methods.test_composites import newest, raw
from safetensors.torch import load_file
from support.models.mtp import FORMS, load, save_with_layer
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.runs.training_files import SFT, burnish, done, make_files, metrics

from burnish.checkpoint.steps import verify

GIVEN: dict[str, Any] = {
    **SFT,
    "model": {"path": "first", "train_mtp": True},
    "engine": {"precision": "fp32", "kind": "megatron"},
    "optim": {"lr": 0.01},
    "checkpoint": {"save_every": 1, "keep_last": 9},
    "evaluation": {"every": 0},
}


def prepared(root: Path, family: str) -> Path:
    make_files(root)
    token = {"eos_token_id": char_tokenizer().eos_token_id, "bos_token_id": None}
    save_with_layer(
        root / "first", family, torch.bfloat16, vocab_size=len(char_tokenizer()), **token
    )
    save_char_tokenizer(root / "first")
    (root / "settings.yaml").write_text(json.dumps(GIVEN))
    return root


def of_layer(directory: Path, family: str) -> set[str]:
    """The names of its tensors in a directory, copies included."""
    model = load(directory, family)
    return {n for n in model.canonical() if n.startswith(model.prefix)} | model.copies().keys()


def raw_files(step: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of all tensors of a step, by file."""
    files = sorted(step.rglob("*.safetensors"))
    return {str(file.relative_to(step)): bytes_in(file) for file in files}


def bytes_in(file: Path) -> dict[str, bytes]:
    held = load_file(file)
    return {name: each.view(-1).view(torch.uint8).numpy().tobytes() for name, each in held.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FORMS)
def test_a_run_trains_the_layer_and_resumes_to_the_bit(tmp_path: Path, family: str) -> None:
    root = prepared(tmp_path, family)
    before = raw(root / "first")
    whole = done(root, "sft", "settings.yaml", "steps=3", "name=whole")
    done(root, "sft", "settings.yaml", "steps=2", "name=parts")
    parts = done(root, "sft", "settings.yaml", "steps=3", "name=parts")
    step = newest(whole)
    assert list(verify(step)) == []
    assert raw_files(step) == raw_files(newest(parts))
    found = raw(step / "model")
    assert found.keys() == before.keys()
    same = {name for name in of_layer(root / "first", family) if found[name] == before[name]}
    assert all(n.endswith("correction_bias") or ".mlp.experts." in n for n in same), same
    assert len(same) < len(of_layer(root / "first", family)) / 2, "no token went to some experts"
    for copy, of in load(step / "model", family).copies().items():
        assert found[copy] == found[of]
    losses = [line["train/mtp_loss"] for line in metrics(whole) if "train/mtp_loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_other_layouts_train_it_on_and_other_engines_keep_it(tmp_path: Path, family: str) -> None:
    root = prepared(tmp_path, family)
    names = of_layer(root / "first", family)
    done(root, "sft", "settings.yaml", "steps=2")
    run = done(root, "sft", "settings.yaml", "steps=3", "engine.tensor_parallel=2", world=2)
    trained = newest(run)
    model = raw(trained / "model")
    second = raw(trained.with_name("step-00000002") / "model")
    assert any(model[name] != second[name] for name in names)
    for dtype in ("bf16", "fp32"):
        out = str(root / dtype)
        assert burnish(root, "ckpt", "export", str(trained), out, "--dtype", dtype)[0] == 0
    assert raw(root / "bf16") == model
    rounded, exact = (load_file(root / n / "model.safetensors") for n in ("bf16", "fp32"))
    assert {exact[name].dtype for name in names} == {torch.float32}
    for name in names:
        torch.testing.assert_close(exact[name], rounded[name].float(), rtol=2**-8, atol=0.0)
    assert not all(torch.equal(exact[n], rounded[n].float()) for n in names)
    others = ["engine.kind=torch", "model.train_mtp=false"]
    run = done(root, "sft", "settings.yaml", *others, "steps=4")
    kept = raw(newest(run) / "model")
    assert kept.keys() == model.keys()
    assert {n for n in names if kept[n] != model[n]} == set()
    assert any(kept[n] != each for n, each in model.items())
    code, said = burnish(root, "sft", "settings.yaml", "steps=5")  # it has no optimizer state
    assert (code, "eh_proj" in said or "mtp.fc" in said) == (4, True)
    again = ["name=again", f"model.path={newest(run) / 'model'}", "steps=1"]
    done(root, "sft", "settings.yaml", *again)
