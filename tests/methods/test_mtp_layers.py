"""Layers for multi-token prediction, which transformers' models lack, stay what they were, byte for byte."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from methods.test_composites import newest, raw
from safetensors.torch import load_file, save_file
from support.models.tiny import save_tiny
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.runs.training_files import SFT, burnish, done, make_files
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.checkpoint.steps import verify
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError
from burnish.models.loading import composite_of, read_model_config, weights_source

LAYER = "model.layers.3."
"""The first behind those of the tiny models, as in DeepSeek-V3 and GLM-4.5."""
FAMILIES: dict[str, tuple[str, str]] = {
    "deepseek_v3": (LAYER, "megatron"),
    "glm4_moe": (LAYER, "megatron"),
    "qwen3_next": ("mtp.", "torch"),
}
"""What precedes the names of their tensors, and the engine that goes on with the run."""
CONFIG = "num_nextn_predict_layers"


def mtp_of(family: str, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors like the published ones: a decoder layer, and what joins an embedding and a hidden state."""
    prefix, _ = FAMILIES[family]
    last = max(int(name.split(".")[2]) for name in held if name.startswith("model.layers."))
    source = f"model.layers.{last}."
    inner = prefix if prefix == LAYER else f"{prefix}layers.0."
    made = {n.replace(source, inner, 1): t for n, t in held.items() if n.startswith(source)}
    if prefix == LAYER:
        made |= dict.fromkeys((f"{prefix}{n}norm.weight" for n in "eh"), held["model.norm.weight"])
        made[f"{prefix}eh_proj.weight"] = torch.cat([held["lm_head.weight"][:32]] * 2, dim=1)
        made[f"{prefix}embed_tokens.weight"] = held["model.embed_tokens.weight"]
        made[f"{prefix}shared_head.head.weight"] = held["lm_head.weight"]
        made[f"{prefix}shared_head.norm.weight"] = held["model.norm.weight"]
    else:
        made["mtp.fc.weight"] = torch.cat([held["lm_head.weight"][:32]] * 2, dim=1)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            made[f"mtp.{name}.weight"] = held["model.norm.weight"]
    return {name: tensor + 0.25 for name, tensor in made.items()}


def save_with_mtp(directory: Path, family: str) -> dict[str, Tensor]:
    """A published model's files: bf16, but fp32 biases of routers. Return the tensors that transformers does not read."""
    token = {"eos_token_id": char_tokenizer().eos_token_id, "bos_token_id": None}
    sizes: dict[str, Any] = {"vocab_size": len(char_tokenizer()), CONFIG: 1, **token}
    save_tiny(directory, family, torch.bfloat16, **sizes)
    save_char_tokenizer(directory)
    path = directory / "model.safetensors"
    held = load_file(path)
    made = mtp_of(family, held)
    for name in made:
        if name.endswith("correction_bias"):
            made[name] = made[name].float() + 0.1
    save_file(held | made, path, {"format": "pt"})
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_these_layers_are_found_and_no_warning_names_them(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = save_with_mtp(tmp_path, family)
    config = ModelConfig(path=str(tmp_path))
    hf_config = read_model_config(config)
    with caplog.at_level(logging.WARNING):
        weights_source(config, hf_config, 0)
    assert "no use for" not in caplog.text
    composite = composite_of(config.path, hf_config)
    assert composite is not None
    assert composite.rest.keys() == made.keys()
    assert not composite.names


def test_quantized_ones_are_refused(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, "glm4_moe")
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    name = f"{LAYER}eh_proj.weight"
    save_file(held | {name: held[name].to(torch.float8_e4m3fn)}, path, {"format": "pt"})
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(IncompatibleError, match="quantized"):
        composite_of(config.path, read_model_config(config))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_keep_these_layers_through_engines_layouts_and_exports(
    tmp_path: Path, family: str
) -> None:
    kind = FAMILIES[family][1]
    make_files(tmp_path)
    made = save_with_mtp(tmp_path / "first", family)
    before = raw(tmp_path / "first")
    given = {
        **SFT,
        "model": {"path": "first"},
        "optim": {"lr": 0.01},
        "checkpoint": {"save_every": 1},
        "evaluation": {"every": 0},
    }
    (tmp_path / "settings.yaml").write_text(json.dumps(given))

    def require_kept(directory: Path) -> None:
        found = raw(directory)
        assert found.keys() == before.keys()
        assert {name: found[name] for name in made} == {name: before[name] for name in made}
        assert any(found[name] != each for name, each in before.items())
        assert json.loads((directory / "config.json").read_text())[CONFIG] == 1

    done(tmp_path, "sft", "settings.yaml", "steps=2")
    more = ["engine.tensor_parallel=2"] if kind == "megatron" else []
    done(tmp_path, "sft", "settings.yaml", "steps=3", f"engine.kind={kind}", *more, world=2)
    run = done(tmp_path, "sft", "settings.yaml", "steps=4")
    for step in sorted((run / "checkpoints").glob("step-*")):
        assert list(verify(step)) == []
        require_kept(step / "model")
    step = newest(run)
    assert step.name == "step-00000004"
    for dtype in ("bf16", "fp32"):
        out = tmp_path / dtype
        assert burnish(tmp_path, "ckpt", "export", str(step), str(out), "--dtype", dtype)[0] == 0
        require_kept(out)
        AutoModelForCausalLM.from_pretrained(out)
    assert burnish(tmp_path, "ckpt", "import", str(out), "imported")[0] == 0
    require_kept(newest(tmp_path / "imported") / "model")
    again = json.dumps({**given, "name": "next", "model": {"path": str(step / "model")}})
    (tmp_path / "again.yaml").write_text(again)
    require_kept(newest(done(tmp_path, "sft", "again.yaml", "steps=1")) / "model")


@pytest.mark.nightly
def test_an_adapter_leaves_these_layers_with_its_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    make_files(tmp_path)
    made = save_with_mtp(tmp_path / "first", "glm4_moe")
    given = {**SFT, "steps": 1, "model": {"path": "first", "lora": {"rank": 2}}}
    (tmp_path / "settings.yaml").write_text(json.dumps(given))
    step = newest(done(tmp_path, "sft", "settings.yaml"))
    assert not [name for name in raw(step / "model") if name.startswith(LAYER)]
    merged = tmp_path / "merged"
    assert burnish(tmp_path, "ckpt", "export", str(step), str(merged), "--merged")[0] == 0
    before, found = raw(tmp_path / "first"), raw(merged)
    assert found.keys() == before.keys()
    assert {name: found[name] for name in made} == {name: before[name] for name in made}
