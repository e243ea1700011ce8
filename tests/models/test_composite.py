"""What surrounds a language model in its checkpoint. The oracle is transformers."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.composites import KINDS, save_composite
from support.models.tokenizers import char_tokenizer
from transformers import AutoModelForImageTextToText
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

from burnish.check.composite_proof import prove_composite
from burnish.checkpoint.tools.import_pickled import pickled
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError
from burnish.models.composite import language_modules, write_composite_assets
from burnish.models.loading import (
    composite_of,
    read_model_config,
    save_model_assets,
    weights_source,
)
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards


def taken_out(directory):
    """The language model as Burnish reads it, and what surrounds it."""
    config = ModelConfig(path=str(directory))
    hf_config = read_model_config(config)
    model = build_on_meta(hf_config)
    source = weights_source(config, hf_config, 0)
    materialize(model, torch.device("cpu"))
    source.fill(model_shards(model))
    return model, composite_of(config.path, hf_config)


def changed(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_the_language_models_or_kept(tmp_path, kind, caplog):
    theirs = save_composite(tmp_path, kind)
    with caplog.at_level(logging.WARNING):
        model, composite = taken_out(tmp_path)
    assert not [each for each in caplog.records if each.name.startswith("burnish")]
    held = load_file(tmp_path / "model.safetensors")
    assert {*composite.names.values(), *composite.rest} == held.keys()
    assert not {*composite.names.values()} & composite.rest.keys()
    backbone = theirs.get_submodule(language_modules(composite, model.config)[1])
    ours = model.base_model.state_dict()
    assert all(torch.equal(ours[name], each) for name, each in backbone.state_dict().items())
    head = theirs.get_output_embeddings().weight
    assert torch.equal(model.get_output_embeddings().weight, head)


def test_a_head_that_differs_from_the_embeddings_is_read_and_saved(tmp_path, caplog):
    save_composite(tmp_path, "mistral3", tie_word_embeddings=True)
    head = torch.randn(108, 32)
    changed(tmp_path, lambda held: held.update({"language_model.lm_head.weight": head}))
    with caplog.at_level(logging.WARNING):
        model, composite = taken_out(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(theirs.get_output_embeddings().weight, head)
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert composite.names["lm_head.weight"] == "language_model.lm_head.weight"


def test_a_copy_of_the_embeddings_is_not_kept(tmp_path):
    """It would be another head than the trained embeddings."""
    save_composite(tmp_path, "gemma4")

    def add(held):
        held["lm_head.weight"] = held["model.language_model.embed_tokens.weight"].clone()

    changed(tmp_path, add)
    assert "lm_head.weight" not in taken_out(tmp_path)[1].rest


def test_a_tensor_that_the_language_model_does_not_know_is_named_and_kept(tmp_path, caplog):
    save_composite(tmp_path, "qwen3_5")
    name = "model.language_model.layers.7.extra"
    changed(tmp_path, lambda held: held.update({name: torch.ones(3), "mtp.fc": torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        composite = taken_out(tmp_path)[1]
    assert {name, "mtp.fc"} <= composite.rest.keys()
    assert composite.strays == {name}
    assert "layers.7" in caplog.text
    assert "mtp" not in caplog.text


def test_a_pickled_checkpoint_without_towers_is_not_imported_as_a_composite(tmp_path):
    save_composite(tmp_path, "mistral3")
    with pytest.raises(IncompatibleError):
        pickled("dcp", tmp_path / "pickles", tmp_path)


def test_two_language_models_are_refused(tmp_path):
    save_composite(tmp_path, "llava")

    def double(held):
        held |= {
            f"second.{n}": t.clone() for n, t in held.items() if n.startswith("language_model.")
        }

    changed(tmp_path, double)
    with pytest.raises(IncompatibleError):
        taken_out(tmp_path)


def test_quantized_towers_are_refused(tmp_path):
    save_composite(tmp_path, "llava")

    def quantize(held):
        name = next(name for name in held if name.startswith("vision_tower."))
        held[name] = held[name].to(torch.float8_e4m3fn)

    changed(tmp_path, quantize)
    with pytest.raises(IncompatibleError):
        taken_out(tmp_path)


def test_a_language_model_alone_has_nothing_around_it(tmp_path):
    save_composite(tmp_path, "llava")
    text = read_model_config(ModelConfig(path=str(tmp_path)))
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(text.to_dict()))
    save_file({"model.norm.weight": torch.ones(1)}, alone / "model.safetensors")
    assert composite_of(str(alone), text) is None
    assert composite_of(None, text) is None


def test_a_saved_config_is_the_composites_with_the_tokenizers_tokens(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    save_composite(whole, "gemma3")
    given = json.loads((whole / "config.json").read_text())
    given |= {"eos_token_id": [77, 2], "torch_dtype": "float32", "made_by": "somebody"}
    given["vision_config"]["dtype"] = "float32"
    (whole / "config.json").write_text(json.dumps(given))
    (whole / "chat_template.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    model, composite = taken_out(whole)
    tokenizer = char_tokenizer()
    save_model_assets(model.config, tokenizer, out, torch.bfloat16)
    write_composite_assets(composite, out, torch.bfloat16)
    found = json.loads((out / "config.json").read_text())
    end = tokenizer.eos_token_id
    assert found["eos_token_id"] == [end, *(each for each in (77, 2) if each != end)]
    assert found["text_config"]["eos_token_id"] == end
    assert found["torch_dtype"] == found["dtype"] == "bfloat16"
    for key in ("architectures", "model_type", "made_by", "vision_config", "image_token_index"):
        assert found.get(key) == given.get(key)
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_composite_reads_texts_as_its_language_model_does(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    save_composite(tmp_path / kind, kind)
    hf_config = read_model_config(ModelConfig(path=str(tmp_path / kind)))
    prove_composite(composite_of(str(tmp_path / kind), hf_config), hf_config)


def test_a_composite_that_computes_other_texts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    save_composite(tmp_path / "llava", "llava")
    hf_config = read_model_config(ModelConfig(path=str(tmp_path / "llava")))
    forward = LlavaForConditionalGeneration.forward

    def doubled(self, **inputs):
        found = forward(self, **inputs)
        found.logits = 2 * found.logits
        return found

    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", doubled)
    with pytest.raises(IncompatibleError):
        prove_composite(composite_of(str(tmp_path / "llava"), hf_config), hf_config)
