from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.states import (
    BIG_SHAPES,
    FaultyStorage,
    bits,
    contents_of,
    make_state,
    save_once,
    shards_of,
    written_by,
)
from support.faults.bit_flips import flip
from support.models.tiny import tiny_model
from transformers import AutoModelForCausalLM

from burnish.checkpoint.steps import open_step
from burnish.checkpoint.tools.export import StepModel, export
from burnish.checkpoint.write_plan import MAIN, rounded
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError, IncompatibleError, UsageError
from burnish.files.safetensors import read_header
from burnish.files.storage import LocalStorage

LOCAL = LocalStorage()
BIG = 1 << 40


def in_bf16(tensor):
    """As `model/` holds it: ties go up."""
    into = torch.empty(tensor.shape, dtype=torch.bfloat16)
    rounded(tensor, into)
    return into


def finite_state(seed=0, shapes=None):
    weights, slots = make_state(seed, shapes)
    weights["embed.weight"][0, :6] = 1.0
    return weights, slots


def save_finite(root, shapes=None, **changes):
    weights, slots = finite_state(0, shapes)
    fields = {"weights": shards_of(weights, Layout()), "training": shards_of(slots, Layout())}
    return open_step(save_once(root, **(fields | changes)), LOCAL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [True, False])
def test_every_tensor_in_the_dtype_of_choice(tmp_path, dtype, split):
    step = save_finite(tmp_path / "checkpoints", BIG_SHAPES, split=split)
    done = export(StepModel(step), tmp_path / "out", dtype, BIG, LOCAL)
    weights, _ = finite_state(0, BIG_SHAPES)
    convert = in_bf16 if split and dtype == torch.bfloat16 else (lambda tensor: tensor.to(dtype))
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(bits(found[name]), bits(convert(tensor))), name
    assert set(done) == {"config.json", "chat_templates/default.jinja", "model.safetensors"}
    assert done == {name: (tmp_path / "out" / name).stat().st_size for name in done}
    assert (tmp_path / "out/chat_templates/default.jinja").read_text() == "{{ messages }}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_integers_stay(tmp_path):
    weights = {"counts": torch.arange(5), "flags": torch.tensor([True]), "w": torch.ones(2)}
    step = save_finite(tmp_path / "checkpoints", weights=shards_of(weights, Layout()), training=[])
    export(StepModel(step), tmp_path / "out", torch.float16, BIG, LOCAL)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["counts"].tolist() == [0, 1, 2, 3, 4]
    assert (found["flags"].dtype, found["w"].dtype) == (torch.bool, torch.float16)


def test_weights_whose_scales_lie_apart_are_refused(tmp_path):
    """As those of gpt-oss in MXFP4, whose config.json would not say so any more."""
    packed = {"w_blocks": torch.ones(4, 16, dtype=torch.uint8), "w_scales": torch.ones(4).byte()}
    step = save_finite(tmp_path / "checkpoints", weights=shards_of(packed, Layout()), training=[])
    with pytest.raises(IncompatibleError, match="w_blocks"):
        export(StepModel(step), tmp_path / "out", torch.bfloat16, BIG, LOCAL)


def test_files_of_a_size_and_their_index(tmp_path):
    step = save_finite(tmp_path / "checkpoints")
    export(StepModel(step), tmp_path / "out", torch.float32, 1600, LOCAL)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert len(files) == 3
    for file in files:
        header = read_header(file)
        assert {index["weight_map"][name] for name in header.entries} == {file.name}
        assert file.stat().st_size - header.size <= 1600 or len(header.entries) == 1
    weights, _ = finite_state()
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"dtype": "float16"}),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        (
            {"dtype": None, "text_config": {"dtype": "bfloat16", "n": 1}},
            {"dtype": None, "text_config": {"dtype": "float16", "n": 1}},
        ),
    ],
)
def test_the_configuration_names_the_dtype(tmp_path, before, after):
    assets = {"config.json": json.dumps({"model_type": "x"} | before).encode()}
    step = save_finite(tmp_path / "checkpoints", assets=assets)
    export(StepModel(step), tmp_path / "out", torch.float16, BIG, LOCAL)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "x"} | after


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformers_loads_it(tmp_path, family):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "plain")
    weights = load_file(tmp_path / "plain/model.safetensors")
    step = save_finite(
        tmp_path / "checkpoints",
        weights=shards_of(weights, Layout()),
        training=[],
        assets=written_by(model.config.save_pretrained),
    )
    export(StepModel(step), tmp_path / "out", torch.float32, 20_000, LOCAL)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(10)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_number_that_does_not_fit_is_refused(tmp_path):
    weights = {"fine": torch.ones(2), "large": torch.tensor([1.0, -7e4, float("inf")])}
    step = save_finite(tmp_path / "checkpoints", weights=shards_of(weights, Layout()), training=[])
    with pytest.raises(IncompatibleError) as caught:
        export(StepModel(step), tmp_path / "out", torch.float16, BIG, LOCAL)
    assert "70000" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    export(StepModel(step), tmp_path / "out", torch.bfloat16, BIG, LOCAL)


@pytest.mark.parametrize("there", ["file", "directory"])
def test_what_is_there_is_not_touched(tmp_path, there):
    step = save_finite(tmp_path / "checkpoints")
    target = tmp_path / "out"
    (target if there == "file" else target / "mine").parent.mkdir(exist_ok=True)
    (target if there == "file" else target / "mine").write_text("x")
    with pytest.raises(UsageError):
        export(StepModel(step), target, torch.float32, BIG, LOCAL)
    assert (target if there == "file" else target / "mine").read_text() == "x"


def test_an_empty_directory_is_filled(tmp_path):
    step = save_finite(tmp_path / "checkpoints")
    (tmp_path / "out").mkdir()
    export(StepModel(step), tmp_path / "out", torch.float32, BIG, LOCAL)
    assert (tmp_path / "out/config.json").is_file()


def test_a_step_without_a_whole_model_is_refused(tmp_path):
    step = save_finite(tmp_path / "checkpoints", assets={})
    with pytest.raises(IncompatibleError):
        export(StepModel(step), tmp_path / "out", torch.float32, BIG, LOCAL)


def test_damage_is_found_and_leaves_nothing(tmp_path):
    step = save_finite(tmp_path / "checkpoints", BIG_SHAPES)
    file = step.path / "training/residual.safetensors"
    flip(file)
    with pytest.raises(CorruptError):
        export(StepModel(step), tmp_path / "out", torch.float32, BIG, LOCAL)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    # bf16 does not need the residual
    export(StepModel(step), tmp_path / "out", torch.bfloat16, BIG, LOCAL)


def test_what_a_killed_export_left_goes(tmp_path):
    step = save_finite(tmp_path / "run")
    left = tmp_path / f".out.{'0' * 32}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with StepModel(step) as model:
        export(model, tmp_path / "out", torch.bfloat16, BIG)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_a_failing_disk_leaves_nothing(tmp_path):
    step = save_finite(tmp_path / "checkpoints")
    storage = FaultyStorage()
    export(StepModel(step), tmp_path / "out", torch.float32, 2000, storage)
    operations = len(storage.operations)
    assert operations > 15
    for number in range(1, operations):  # the last one syncs what has its name already
        storage = FaultyStorage(fail_at=number, error=errno.ENOSPC)
        with pytest.raises(BurnishError):
            export(StepModel(step), tmp_path / f"failed-{number}", torch.float32, 2000, storage)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_a_steps_model_is_unchanged_by_the_round(tmp_path):
    """Saved, exported in fp32, saved again from that: the same files."""
    step = save_finite(tmp_path / "checkpoints")
    export(StepModel(step), tmp_path / "out", torch.float32, BIG, LOCAL)
    weights = load_file(tmp_path / "out/model.safetensors")
    again = save_finite(tmp_path / "again", weights=contents_of(weights, {}).models[MAIN].weights)
    for name in ("model/model.safetensors", "training/residual.safetensors"):
        assert (again.path / name).read_bytes() == (step.path / name).read_bytes()
