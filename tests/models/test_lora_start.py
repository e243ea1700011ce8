"""Training goes on from PEFT's adapters, those of other programs included, or says why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.adapters import LORA, plain_adapted
from support.models.tiny import save_tiny, tiny_config, tiny_model
from transformers import AutoConfig, PretrainedConfig

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Shard, ShardSource, TensorSpec
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.models.loading import FreshSource
from burnish.models.lora.adapter import Adapter, adapter_record, first_adapter
from burnish.models.lora.adapter_config import with_adapter
from burnish.models.meta_init import build_on_meta

CONFIG = tiny_config("qwen3")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", "qwen3", torch.float32)


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """As PEFT itself saves one."""
    plain_adapted(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def changed(adapter: Path, **values: Any) -> bytes:
    """Change its description; returns it."""
    file = adapter / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return file.read_bytes()


def started(
    base: Path, adapter: Path, hf_config: PretrainedConfig = CONFIG
) -> tuple[ModelConfig, ShardSource]:
    model = ModelConfig(path=str(base), lora=LoraConfig(path=str(adapter)))
    model = with_adapter(model, (adapter / ADAPTER_CONFIG).read_bytes())
    record = adapter_record(model, AutoConfig.from_pretrained(base))
    return model, first_adapter(model, hf_config, record, 0, FreshSource(hf_config, 0))


def test_pefts_adapter_is_what_training_starts_from(base: Path, adapter: Path) -> None:
    changed(adapter, use_rslora=True, lora_dropout=0.1)
    model, source = started(base, adapter)
    assert (model.lora.rank, model.lora.alpha, model.lora.rslora) == (LORA.rank, LORA.alpha, True)
    assert model.adapter == model.lora
    saved = load_file(adapter / "adapter_model.safetensors")
    regions = Adapter(build_on_meta(CONFIG), model.lora).weights
    assert {region.name for region in regions} == saved.keys()
    for region in regions:
        spec = TensorSpec(region.name, region.shape, torch.float32)
        part = Box((1, 2), (2, 2))
        for box in (whole(region.shape), part):
            shard = Shard(spec, box, torch.empty(box.sizes))
            source.fill([shard])
            assert torch.equal(shard.tensor, saved[region.name][box.slices])


@pytest.mark.parametrize("names", [["mlp.experts.down_proj"], ["experts.down_proj"], ["down_proj"]])
def test_pefts_adapter_of_experts_is_what_training_starts_from(
    tmp_path: Path, names: list[str]
) -> None:
    base = save_tiny(tmp_path / "base", "mixtral", torch.float32)
    lora = LoraConfig(rank=2, targets=["v_proj", "experts.down_proj"])
    plain_adapted(base, lora).save_pretrained(tmp_path / "adapter")
    changed(tmp_path / "adapter", target_parameters=names)
    model, source = started(base, tmp_path / "adapter", tiny_config("mixtral"))
    assert model.lora.targets == lora.targets
    for name, tensor in load_file(tmp_path / "adapter/adapter_model.safetensors").items():
        box = whole(tuple(tensor.shape))
        shard = Shard(TensorSpec(name, box.sizes, torch.float32), box, torch.empty(box.sizes))
        source.fill([shard])
        assert torch.equal(shard.tensor, tensor)


def test_an_adapter_may_be_of_experts_alone(base: Path, adapter: Path) -> None:
    """As PEFT saves one of a family for which it knows no layers of its own accord."""
    content = changed(adapter, target_modules=None, target_parameters=["mlp.experts.down_proj"])
    model = ModelConfig(path=str(base), lora=LoraConfig(path=str(adapter)))
    assert with_adapter(model, content).lora.targets == ["experts.down_proj"]


def test_how_it_is_published_is_not_its_own_to_say(adapter: Path) -> None:
    content = (adapter / ADAPTER_CONFIG).read_bytes()
    model = ModelConfig(path="m", lora=LoraConfig(path=str(adapter), publish="adapter"))
    assert with_adapter(model, content).lora.publish == "adapter"


def test_a_path_is_an_adapter_as_well_as_a_rank_is() -> None:
    model = ModelConfig(path="m", lora=LoraConfig(rank=2))
    assert model.adapter == model.lora
    assert ModelConfig(path="m").adapter is None
    assert ModelConfig(path="m", lora=LoraConfig(path="a")).adapter is not None


REFUSED = [
    ({"bias": "all"}, "bias: all"),
    ({"peft_type": "IA3"}, "peft_type: IA3"),
    ({"target_parameters": "mlp.experts.gate_up_proj"}, "targets"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
    ({"something_new": {"on": True}}, "something_new"),
    ({"target_modules": ".*q_proj"}, "targets"),
    ({"target_modules": None}, "targets"),
    ({"r": -1}, "rank"),
    ({"lora_alpha": "much"}, "alpha"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_what_is_not_trained_here_is_refused_by_name(
    base: Path, adapter: Path, values: dict[str, Any], said: str
) -> None:
    changed(adapter, **values)
    with pytest.raises(IncompatibleError, match=ADAPTER_CONFIG) as caught:
        started(base, adapter)
    assert said in str(caught.value)


def test_a_description_that_is_none(base: Path, adapter: Path) -> None:
    for content, kind in ((b"{", CorruptError), (b"[]", IncompatibleError), (b"{}", IncompatibleError)):  # fmt: skip
        (adapter / ADAPTER_CONFIG).write_bytes(content)
        with pytest.raises(kind, match=ADAPTER_CONFIG):
            started(base, adapter)


def test_the_adapter_of_another_model_is_refused(tmp_path: Path, base: Path, adapter: Path) -> None:
    tiny_model("qwen3", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(IncompatibleError):
        started(tmp_path / "other", adapter)
    # What its run wrote down counts before a path at which another model may lie by now.
    (tmp_path / "state.json").write_text(json.dumps({"adapter": {"base_digest": "f00d"}}))
    with pytest.raises(IncompatibleError) as caught:
        started(base, adapter)
    assert "f00d" in str(caught.value)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"adapter": [1]}', '{"adapter": {"x": 1}}', "no JSON"]
)
def test_a_state_file_of_another_program_beside_it_changes_nothing(
    tmp_path: Path, base: Path, adapter: Path, content: str
) -> None:
    """The model is compared all the same."""
    (tmp_path / "state.json").write_text(content)
    assert (adapter.parent / "state.json").is_file()
    started(base, adapter)
    tiny_model("qwen3", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(IncompatibleError):
        started(tmp_path / "other", adapter)


@pytest.mark.parametrize("place", ["Qwen/Qwen3-0.6B", None, "", 7, ["x"]])
def test_where_it_cannot_be_known_that_is_said(
    base: Path, adapter: Path, place: object, caplog: pytest.LogCaptureFixture
) -> None:
    changed(adapter, base_model_name_or_path=place)
    with caplog.at_level(logging.WARNING):
        started(base, adapter)
    assert "does not say which model it belongs to" in caplog.text


def test_other_tensors_than_its_description_says(base: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    saved = load_file(file)
    save_file(saved | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}, file)
    with pytest.raises(IncompatibleError) as caught:
        started(base, adapter)
    assert "lm_head" in str(caught.value)
    changed(adapter, r=2)
    with pytest.raises(IncompatibleError):
        started(base, adapter)
    changed(adapter, r=4)
    save_file(dict(list(saved.items())[1:]), file)
    with pytest.raises(MissingError):
        started(base, adapter)
