import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from support.models.tiny import FAMILIES, VOCAB, save_tiny, tiny_config, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.trainer_utils import align_special_tokens

from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError, MissingError, UsageError
from burnish.models.loading import (
    FreshSource,
    SafetensorsSource,
    read_model_config,
    save_model_assets,
    weights_source,
)
from burnish.models.meta_init import build_on_meta, fill_buffers, materialize
from burnish.models.names import model_shards

# Older ones erase special tokens of config.json that the tokenizer lacks, and further tokens that end completions.
KEEPS_TOKENS = Version(transformers.__version__) >= Version("5.19")


def test_config_of_a_directory(tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    config = read_model_config(ModelConfig(path=str(tmp_path)))
    assert config.model_type == "qwen3_moe"
    assert config.vocab_size == VOCAB


def test_a_directory_below_home(tmp_path, monkeypatch):
    save_tiny(tmp_path / "m", "llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = ModelConfig(path="~/m")
    hf_config = read_model_config(config)
    assert hf_config.model_type == "llama"
    assert isinstance(weights_source(config, hf_config, 0), SafetensorsSource)


def test_config_of_a_fresh_model(tmp_path):
    values = {"model_type": "qwen3", "vocab_size": 11, "hidden_size": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    for fresh in (values, str(path)):
        config = read_model_config(ModelConfig(fresh=fresh))
        assert (config.model_type, config.vocab_size, config.hidden_size) == ("qwen3", 11, 8)
    assert values["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, UsageError, "model.path"),
        ({"path": "/nowhere/at/all"}, MissingError, "/nowhere/at/all"),
        ({"fresh": "/nowhere/config.json"}, MissingError, "/nowhere/config.json"),
        ({"fresh": {"hidden_size": 8}}, UsageError, "model_type"),
        ({"fresh": {"model_type": "qwen33"}}, UsageError, "qwen33"),
    ],
)
def test_no_config(config, error, message):
    with pytest.raises(error, match=message):
        read_model_config(ModelConfig(**config))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_not_json(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "config.json"))):
        read_model_config(ModelConfig(fresh=str(tmp_path / "config.json")))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "qwen33"}'])
def test_a_directory_whose_config_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}")) as caught:
        read_model_config(ModelConfig(path=str(tmp_path)))
    assert caught.value.do


def test_a_directory_without_config(tmp_path):
    with pytest.raises(MissingError) as caught:
        read_model_config(ModelConfig(path=str(tmp_path)))
    assert caught.value.have == "no config.json"


def test_the_first_weights(tmp_path):
    save_tiny(tmp_path, "llama")
    config = ModelConfig(path=str(tmp_path))
    assert isinstance(weights_source(config, read_model_config(config), 0), SafetensorsSource)
    assert isinstance(weights_source(ModelConfig(fresh={}), tiny_config(), 0), FreshSource)
    with pytest.raises(IncompatibleError):
        weights_source(config, tiny_config("llama", hidden_size=64), 0)
    with pytest.raises(MissingError):
        weights_source(config, tiny_config("llama", num_hidden_layers=4), 0)


def test_building_leaves_the_configuration_alone():
    config = tiny_config("llama", attention_dropout=0.5, dtype="bfloat16")
    before = config.to_dict()
    model = build_on_meta(config)
    assert config.to_dict() == before
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_plain_transformers(family):
    changes = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
    model = tiny_model(family, **({} if family == "gemma3_text" else changes))
    ours = build_on_meta(model.config)
    fill_buffers(ours, torch.device("cpu"))
    expected = dict(model.named_buffers())
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, expected.pop(name)), name
    assert not expected


def test_a_model_that_does_not_know_its_buffers(monkeypatch):
    model = build_on_meta(tiny_config("llama"))
    monkeypatch.setattr(type(model).__mro__[1], "_init_weights", lambda self, module: None)
    with pytest.raises(IncompatibleError, match=r"rotary_emb\.inv_freq"):
        fill_buffers(model, torch.device("cpu"))


@pytest.fixture
def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    words = Tokenizer(WordLevel(vocabulary, "<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template="{{ messages[0].content }}",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_assets_and_weights_make_a_hugging_face_directory(tmp_path, family, tokenizer):
    model = tiny_model(family).to(torch.bfloat16)
    save_model_assets(model.config, tokenizer, tmp_path / "out", torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "out" / "model.safetensors")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is type(model)
    assert back.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    if KEEPS_TOKENS:
        align_special_tokens(model, tokenizer)
        model.config.save_pretrained(tmp_path / "theirs")
        theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
        ours = json.loads((tmp_path / "out" / "config.json").read_text())
        assert ours == theirs
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("a b").input_ids == [2, 3]
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.skipif(not KEEPS_TOKENS, reason="an older Trainer is another oracle")
@pytest.mark.parametrize("given", [2, [5, 2], [5, 1, 2], None])
@pytest.mark.parametrize("generation", ["absent", 7, [7, 2], [1, 7]])
@pytest.mark.parametrize("pad", ["<pad>", None])
def test_special_tokens_are_aligned_as_by_transformers_trainer(
    tmp_path, tokenizer, given, generation, pad
):
    tokenizer.pad_token = pad
    directory = save_tiny(tmp_path / "in", "llama", eos_token_id=given, pad_token_id=9)
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation != "absent":
        path.write_text(json.dumps({"eos_token_id": generation, "temperature": 0.5}))
    config = read_model_config(ModelConfig(path=str(directory)))
    save_model_assets(config, tokenizer, tmp_path / "out", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    align_special_tokens(plain, tokenizer)
    ours = AutoConfig.from_pretrained(tmp_path / "out")
    mine = GenerationConfig.from_pretrained(tmp_path / "out")
    theirs = plain.generation_config
    assert ours.eos_token_id == plain.config.eos_token_id or set(ours.eos_token_id) == set(given)
    assert ours.pad_token_id == plain.config.pad_token_id
    assert mine.pad_token_id == theirs.pad_token_id
    ids = [
        each if isinstance(each, list) else [each]
        for each in (mine.eos_token_id, theirs.eos_token_id)
    ]
    assert ids[0][0] == tokenizer.eos_token_id
    assert set(ids[0]) == set(ids[1])
    assert config.eos_token_id == given


def test_tokens_that_end_turns_end_completions_of_the_saved_model(tmp_path, tokenizer):
    directory = save_tiny(tmp_path / "in", "llama")
    config = read_model_config(ModelConfig(path=str(directory)))
    save_model_assets(config, tokenizer, tmp_path / "out", torch.float32, ends=(1, 3))
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 2, 3]


def test_a_composite_has_the_tokens_in_both_of_its_configurations(tmp_path, tokenizer):
    text = tiny_config("gemma3_text").to_dict()
    both = AutoConfig.for_model("gemma3", text_config=text, eos_token_id=9)
    save_model_assets(both, tokenizer, tmp_path, torch.float32)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["eos_token_id"] == saved["text_config"]["eos_token_id"] == 1


def test_the_generation_config_is_carried_over(tmp_path):
    save_tiny(tmp_path / "in")
    path = tmp_path / "in" / "generation_config.json"
    odd = {"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9}  # without do_sample
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    config = AutoConfig.from_pretrained(tmp_path / "in")
    save_model_assets(config, None, tmp_path / "out", torch.float32)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved.items() >= odd.items()


def test_neither_code_without_consent_nor_a_stale_quantization_is_kept(tmp_path):
    save_tiny(tmp_path / "in")
    (tmp_path / "in" / "modeling_mine.py").write_text("x = 1\n")
    config = AutoConfig.from_pretrained(tmp_path / "in")
    config.auto_map = {"AutoConfig": "modeling_mine.MyConfig"}
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    save_model_assets(config, None, tmp_path / "out", torch.float32)
    assert not list((tmp_path / "out").glob("*.py"))
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"auto_map", "quantization_config"} & saved.keys()
    assert config.auto_map
    assert config.quantization_config


CUSTOM = {
    "configuration_mine.py": """
from transformers import LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "mine"
""",
    "modeling_mine.py": """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
""",
}

USE_CUSTOM = """
import sys, torch
from burnish.config.schema import ModelConfig
from burnish.models.loading import read_model_config, save_model_assets, weights_source
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards

source, target = sys.argv[1:]
config = ModelConfig(path=source, trust_remote_code=True)
hf_config = read_model_config(config)
model = build_on_meta(hf_config)
assert type(model).__name__ == "MineForCausalLM"
materialize(model, torch.device("cpu"))
weights_source(config, hf_config, 0).fill(model_shards(model))
save_model_assets(hf_config, None, target, torch.float32)
"""


@pytest.mark.nightly
def test_a_model_with_code_of_its_own(tmp_path):
    """In a process of its own, because transformers keeps such code in its cache directory; its files are links into a hub's cache."""
    source, target = save_tiny(tmp_path / "snapshots" / "in", "llama"), tmp_path / "out"
    (tmp_path / "blobs").mkdir()
    for name, text in CUSTOM.items():
        (tmp_path / "blobs" / name).write_text(text)
        (source / name).symlink_to(Path("../../blobs") / name)
    values = json.loads((source / "config.json").read_text())
    values["model_type"] = "mine"
    values["architectures"] = ["MineForCausalLM"]
    values["auto_map"] = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (source / "config.json").write_text(json.dumps(values))
    subprocess.run(
        [sys.executable, "-c", USE_CUSTOM, str(source), str(target)],
        check=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
    )
    assert (target / "modeling_mine.py").read_text() == CUSTOM["modeling_mine.py"]
    assert json.loads((target / "config.json").read_text())["architectures"] == ["MineForCausalLM"]


def test_the_padding_token_s_embedding_is_the_file_s(tmp_path):
    """transformers loads Youtu with zeros there, and other families as here."""
    for family, zeroed in (("youtu", True), ("qwen3", False)):
        sizes = {
            "vocab_size": 9,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "pad_token_id": 2,
            "intermediate_size": 64,
        }
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        embedding = model.get_input_embeddings().weight.detach().fill_(1.0)
        model.save_pretrained(tmp_path / family)
        config = ModelConfig(path=str(tmp_path / family))
        hf_config = read_model_config(config)
        loaded = build_on_meta(hf_config)
        materialize(loaded, torch.device("cpu"))
        weights_source(config, hf_config, 0).fill(model_shards(loaded))
        assert torch.equal(loaded.get_input_embeddings().weight, embedding)
        plain = AutoModelForCausalLM.from_pretrained(config.path).get_input_embeddings().weight
        assert (plain[2] == 0).all() == zeroed
