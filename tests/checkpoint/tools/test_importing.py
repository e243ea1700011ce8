from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.states import bits
from support.models.tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from burnish.boxes.tensor_reader import DirectoryReader
from burnish.checkpoint.load import StepReader
from burnish.checkpoint.steps import open_step, verify
from burnish.checkpoint.tools.export import StepModel, export
from burnish.checkpoint.tools.importing import hugging_face, mapped_tensors, save_foreign
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError, UsageError
from burnish.files.lease import holding_lease
from burnish.files.storage import LocalStorage

LOCAL = LocalStorage()


def imported(source, root, step=0):
    return open_step(save_foreign(hugging_face(source), root, step), LOCAL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_comes_over_exactly(tmp_path, dtype):
    source = save_tiny(tmp_path / "source", dtype=dtype)
    config = json.loads((source / "config.json").read_text())
    stale = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (source / "config.json").write_text(json.dumps(config | stale))
    step = imported(source, tmp_path / "run/checkpoints", 7)
    assert "quantization_config" not in json.loads((step.path / "model/config.json").read_text())
    assert list(verify(step.path)) == []
    assert (step.step, step.healthy) == (7, True)
    assert step.state["training"] == "absent"
    assert step.state["imported"] == {"kind": "huggingface", "source": str(source)}
    with DirectoryReader(source, "model/") as before, StepReader(step) as after:
        assert before.tensors == after.tensors
        for key, described in before.tensors.items():
            pair = (each.read_range(key, 0, described.elements) for each in (before, after))
            assert torch.equal(*map(bits, pair)), key


def test_the_model_directory_loads_with_transformers(tmp_path):
    source = save_tiny(tmp_path / "source", dtype=torch.float32)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    for name in ("README.md", "pytorch_model.bin", "training_args.bin"):
        (source / name).write_text("")
    step = imported(source, tmp_path / "run/checkpoints")
    names = {name for name in step.manifest.files if name.startswith("model/")}
    assert names == {
        "model/additional_chat_templates/tools.jinja", "model/chat_template.jinja", "model/config.json",
        "model/generation_config.json", "model/model.safetensors", "model/tokenizer.json",
    }  # fmt: skip
    assert json.loads((step.path / "model/config.json").read_text())["dtype"] == "bfloat16"
    (step.path / "model/tokenizer.json").unlink()
    (step.path / "model/chat_template.jinja").unlink()
    again = AutoModelForCausalLM.from_pretrained(step.path / "model")
    assert again.dtype == torch.bfloat16
    expected = tiny_model().state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.allclose(tensor.float(), expected[name], rtol=2**-8, atol=1e-30), name


def test_what_is_not_all_fp32_stays_as_it_is(tmp_path):
    """Of a model in fp16 with a bias in fp32, nothing is split, and config.json goes on naming fp16."""
    source = save_tiny(tmp_path / "source", dtype=torch.float16)
    weights = load_file(source / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name].float() * 1.001
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    step = imported(source, tmp_path / "run/checkpoints")
    found = load_file(step.path / "model/model.safetensors")
    assert {key: bits(tensor).tolist() for key, tensor in found.items()} == {
        key: bits(tensor).tolist() for key, tensor in weights.items()
    }
    assert json.loads((step.path / "model/config.json").read_text())["dtype"] == "float16"
    export(StepModel(step), tmp_path / "out", torch.bfloat16, 1 << 40, LOCAL)
    kept = load_file(tmp_path / "out/model.safetensors")
    assert {key for key, tensor in kept.items() if tensor.dtype == torch.float32} == {name}
    assert torch.equal(kept[name], weights[name])


def test_a_run_inside_a_checkpoint_is_refused(tmp_path):
    source = save_tiny(tmp_path / "source")
    step = imported(source, tmp_path / "run/checkpoints")
    with pytest.raises(UsageError):
        imported(source, step.path / "again/checkpoints")
    with pytest.raises(UsageError):
        export(StepModel(step), step.path / "fp16", torch.float16, 1 << 40, LOCAL)
    assert list(verify(step.path)) == []


def test_several_files(tmp_path):
    tiny_model().save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert len(list(tmp_path.glob("source/*.safetensors"))) > 2
    step = imported(tmp_path / "source", tmp_path / "run/checkpoints")
    weights = tiny_model().state_dict()
    with StepReader(step) as tensors:
        for key, described in tensors.tensors.items():
            found = tensors.read_range(key, 0, described.elements).view(described.shape)
            assert torch.equal(found, weights[key.removeprefix("model/")])


def test_files_behind_links_as_in_a_hubs_cache(tmp_path):
    blobs = save_tiny(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    step = imported(tmp_path / "snapshot", tmp_path / "run/checkpoints")
    assert list(verify(step.path)) == []


def test_weights_that_are_not_finite_make_it_unhealthy(tmp_path):
    source = save_tiny(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    weights["counts"] = torch.arange(3)
    save_file(weights, source / "model.safetensors")
    assert not imported(source, tmp_path / "run/checkpoints").healthy


def test_a_file_whose_tensors_are_not_aligned(tmp_path):
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    data = torch.tensor([1.5, -2.5]).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\7" + data
    )
    found = mapped_tensors(tmp_path / "x.safetensors")
    assert (found["a"].tolist(), found["b"].tolist()) == ([7], [1.5, -2.5])


def test_the_source_is_never_written(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()
    mapped_tensors(tmp_path / "x.safetensors")["a"].zero_()
    assert (tmp_path / "x.safetensors").read_bytes() == before


def test_a_step_is_never_overwritten(tmp_path):
    source = save_tiny(tmp_path / "source")
    imported(source, tmp_path / "checkpoints", 3)
    with pytest.raises(BurnishError):
        imported(source, tmp_path / "checkpoints", 3)
    imported(source, tmp_path / "checkpoints", 4)


def test_a_directory_in_use_is_refused(tmp_path):
    source = save_tiny(tmp_path / "source")
    with (
        holding_lease(tmp_path / "checkpoints/.lease"),
        pytest.raises(BurnishError),
    ):
        imported(source, tmp_path / "checkpoints")


def spoil(source, how):
    weights = source / "model.safetensors"
    data = weights.read_bytes()
    if how == "no configuration":
        (source / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(data[:-1])
    elif how == "configuration is none":
        (source / "config.json").write_text("[]")
    elif how == "twice":
        weights.rename(source / "model-1.safetensors")
        (source / "model-2.safetensors").write_bytes(data)
    elif how == "a part":
        weights.rename(source / "model-00001-of-00002.safetensors")
    elif how == "a tensor":
        weight_map = {"weights.that.went": weights.name}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif how == "a link to nothing":
        (source / "tokenizer.json").symlink_to("nothing")
    elif how == "huge":
        with (source / "tokenizer.json").open("wb") as file:
            file.truncate((64 << 20) + 1)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("no configuration", MissingError, "config.json"),
        ("no weights", MissingError, "safetensors"),
        ("truncated", CorruptError, "model.safetensors"),
        ("configuration is none", CorruptError, "config.json"),
        ("twice", CorruptError, "model-0000"),
        ("a part", MissingError, "model-00002-of-00002.safetensors"),
        ("a tensor", MissingError, "weights.that.went"),
        ("a link to nothing", MissingError, "tokenizer.json"),
        ("huge", IncompatibleError, "tokenizer.json"),
    ],
)
def test_what_cannot_be_imported_is_said_and_leaves_nothing(tmp_path, how, error, said):
    source = save_tiny(tmp_path / "source", dtype=torch.float32)
    spoil(source, how)
    with pytest.raises(error):
        imported(source, tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


def test_what_cannot_be_imported_leaves_a_run_as_it_was(tmp_path):
    root = imported(save_tiny(tmp_path / "source"), tmp_path / "run/checkpoints", 3).path.parent
    spoil(tmp_path / "source", "configuration is none")
    with pytest.raises(CorruptError):
        imported(tmp_path / "source", root)
    with pytest.raises(CorruptError):
        imported(tmp_path / "source", tmp_path / "run/more/checkpoints")
    assert {path.name for path in root.iterdir()} == {".lease", "step-00000003"}
    assert list((tmp_path / "run").iterdir()) == [root]


def test_a_half_of_a_character_in_the_configuration_is_kept(tmp_path):
    source = save_tiny(tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"note": "\ud800"}
    (source / "config.json").write_text(json.dumps(config))
    step = imported(source, tmp_path / "checkpoints")
    assert json.loads((step.path / "model/config.json").read_text())["note"] == "\ud800"
