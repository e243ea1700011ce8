"""Files with several tensors for one weight, with tensors that the model lacks, and with an index of other files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny import save_tiny, tiny_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from burnish.boxes.tensor_reader import DirectoryReader
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError
from burnish.files.safetensors import INDEX
from burnish.models.loading import read_model_config, save_model_assets, weights_source
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.arange(3, 20)[None]


def loaded(directory: Path) -> PreTrainedModel:
    """Load as a run does."""
    config = ModelConfig(path=str(directory))
    hf_config = read_model_config(config)
    model = build_on_meta(hf_config)
    materialize(model, torch.device("cpu"))
    weights_source(config, hf_config, 0).fill(model_shards(model))
    return model


def edited(directory: Path, **changes: Tensor) -> dict[str, Tensor]:
    """Add tensors to a model's file, or replace them; return all."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file(tensors, path, {"format": "pt"})
    return tensors


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "burnish.models.loading"]


def plain_logits(directory: Path) -> Tensor:
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return plain.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3"])
def test_a_head_unlike_the_embeddings_is_read_and_kept_untied(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "in", family, torch.float32)
    head = torch.randn_like(load_file(tmp_path / "in/model.safetensors")[EMBEDDING])
    tensors = edited(tmp_path / "in", **{HEAD: head})
    model = loaded(tmp_path / "in")
    assert any(HEAD in line for line in said(caplog))
    for name in (HEAD, EMBEDDING):
        assert torch.equal(model.state_dict()[name], tensors[name])
    config = read_model_config(ModelConfig(path=str(tmp_path / "in")))
    save_model_assets(config, None, tmp_path / "out", torch.float32)
    save_file(model.state_dict(), tmp_path / "out/model.safetensors", {"format": "pt"})
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(tmp_path / "in"))


def test_a_head_of_equal_numbers_stays_tied_whatever_its_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "qwen2", torch.bfloat16)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    for head in (embedding.clone(), embedding.float()):
        edited(tmp_path, **{HEAD: head})
        model = loaded(tmp_path)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert said(caplog) == []


def test_two_language_models_with_other_numbers_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    norm = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    edited(tmp_path, **{"model.language_model.norm.weight": norm.clone()})
    loaded(tmp_path)
    edited(tmp_path, **{"model.language_model.norm.weight": norm + 1e-3})
    with pytest.raises(IncompatibleError) as caught:
        loaded(tmp_path)
    assert "model.language_model.norm.weight" in str(caught.value.have)


def test_a_tied_head_that_differs_from_one_of_two_embeddings_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", torch.float32)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    other = "model.language_model.embed_tokens.weight"
    edited(tmp_path, **{HEAD: embedding.clone(), other: embedding * 2})
    with pytest.raises(IncompatibleError) as caught:
        loaded(tmp_path)
    assert other in str(caught.value.have)


def test_a_weight_beside_its_packed_form_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss", torch.bfloat16)
    name = "model.layers.0.mlp.experts.down_proj"
    edited(tmp_path, **{f"{name}_blocks": torch.zeros(4, 32, 2, 16, dtype=torch.uint8)})
    with pytest.raises(IncompatibleError) as caught:
        loaded(tmp_path)
    assert f"{name}_blocks" in str(caught.value.have)


UNUSED = {
    "v_head.summary.weight": torch.ones(1, 32),
    "model.layers.2.mlp.up_proj.weight": torch.ones(48, 32),
    "model.layers.0.self_attn.q_proj.weight_scale": torch.ones(()),
    "base_model.model.model.norm.weight": torch.ones(32),
}


def test_every_tensor_that_the_model_lacks_is_named_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama")
    many = {f"model.layers.3.part.{n}": torch.ones(1) for n in range(40)}
    edited(tmp_path, **UNUSED, **many)
    loaded(tmp_path)
    [line] = said(caplog)
    beginnings = (
        "v_head.",
        "model.layers.2.",
        "model.layers.3.* (40)",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "base_model.",
    )
    assert all(each in line for each in beginnings)


def test_constants_that_old_files_hold_are_not_worth_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama")
    layer = "model.layers.1.self_attn"
    constants = {
        f"{layer}.rotary_emb.inv_freq": torch.ones(4),
        f"{layer}.masked_bias": torch.tensor(-1e9),
        f"{layer}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "model.embeddings.position_ids": torch.arange(8)[None],
    }
    edited(tmp_path, **constants)
    loaded(tmp_path)
    assert said(caplog) == []
    edited(tmp_path, **{"model.layers.1.self_attn.k_proj.bias": torch.ones(32)})
    loaded(tmp_path)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"weight_map": {"gone.weight": "model-00001-of-00002.safetensors"}},
        {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}},
        {"metadata": {"total_size": 12}},
    ],
)
def test_an_index_of_other_files_is_named(
    tmp_path: Path, change: dict[str, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    parts = {name: files[name.startswith("model.")] for name in tensors}
    for file in files:
        save_file({n: t for n, t in tensors.items() if parts[n] == file}, tmp_path / file)
    size = sum(t.nbytes for t in tensors.values())
    index: dict[str, dict[str, object]] = {
        "metadata": {"total_size": size},
        "weight_map": {**parts},
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    loaded(tmp_path)
    assert said(caplog) == []
    for key, values in change.items():
        index[key] |= values
    (tmp_path / INDEX).write_text(json.dumps(index))
    loaded(tmp_path)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("beside", ["pytorch_model.bin", "consolidated.safetensors", "m.gguf"])
def test_weights_that_are_not_read_are_named_once(
    tmp_path: Path, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    (tmp_path / beside).write_bytes(b"x")
    loaded(tmp_path)
    [line] = said(caplog)
    assert beside in line


def test_numbers_are_compared_to_the_last_element(tmp_path: Path) -> None:
    x = torch.randn(1 << 21)
    last = x.clone()
    last[-1] += 1
    tensors = {
        "x": x,
        "same": x.clone(),
        "wide": x.double(),
        "last": last,
        "shape": x.view(2, -1).clone(),
        "scalar": torch.tensor(2.0),
        "whole": torch.tensor(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with DirectoryReader(tmp_path) as reader:
        assert [name for name in tensors if reader.same("x", name)] == ["x", "same", "wide"]
        assert reader.same("scalar", "whole")


def test_an_untied_configuration_needs_both(tmp_path: Path) -> None:
    """The rule is about files that contradict config.json; others are as before."""
    tiny_config("qwen2").save_pretrained(tmp_path)
    assert read_model_config(ModelConfig(path=str(tmp_path))).tie_word_embeddings
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
