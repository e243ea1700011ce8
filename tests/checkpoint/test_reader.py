"""Reading tensors in pieces: every element of every tensor, checked, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.states import BIG_SHAPES, bits, make_state, save_once, shards_of
from support.faults.bit_flips import flip
from support.models.tiny import save_tiny

from burnish.boxes.tensor_reader import DirectoryReader, chunks
from burnish.checkpoint.load import StepReader
from burnish.checkpoint.steps import DamagedBlock, open_step
from burnish.checkpoint.write_plan import rounded
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.storage import LocalStorage

LOCAL = LocalStorage()


def read_all(stream, key, size=999_983):
    """A whole tensor, in uneven pieces."""
    described = stream.tensors[key]
    pieces = [stream.read_range(key, *span) for span in chunks(described.elements, size)]
    whole = torch.cat(pieces) if pieces else torch.empty(0, dtype=described.dtype)
    assert whole.dtype == described.dtype
    return whole.view(described.shape)


@pytest.fixture(scope="module")
def state():
    return make_state(3, BIG_SHAPES)


@pytest.fixture(scope="module")
def step(tmp_path_factory, state):
    weights, slots = state
    root = tmp_path_factory.mktemp("checkpoints")
    return save_once(
        root, weights=shards_of(weights, Layout()), training=shards_of(slots, Layout())
    )


@pytest.mark.parametrize("size", [4096 - 1, 999_983, 1 << 30])
def test_a_steps_tensors_are_exact(step, state, size):
    weights, slots = state
    expected = {f"model/{name}": tensor for name, tensor in weights.items()} | slots
    with StepReader(open_step(step, LOCAL)) as stream:
        assert stream.tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(bits(read_all(stream, key, size)), bits(tensor)), key


def test_what_the_model_directory_holds(step, state):
    name = "head.weight"
    with StepReader(open_step(step, LOCAL)) as stream:
        found = stream.read_range(f"model/{name}", 5, 1000, torch.bfloat16)
    expected = torch.empty(BIG_SHAPES[name], dtype=torch.bfloat16)
    rounded(state[0][name], expected)
    assert torch.equal(bits(found), bits(expected.flatten()[5:1000]))


def test_a_step_without_a_residual(tmp_path):
    path = save_once(tmp_path, split=False)
    weights, _ = make_state(0)
    with StepReader(open_step(path, LOCAL)) as stream:
        for name, tensor in weights.items():
            assert torch.equal(bits(read_all(stream, f"model/{name}")), bits(tensor))


def test_a_damaged_block_is_found_when_it_is_read(tmp_path):
    path = save_once(tmp_path)
    file = path / "training/exp_avg.safetensors"
    flip(file)
    # All headers are checked on opening, and these files have one block.
    with pytest.raises(DamagedBlock, match=r"exp_avg\.safetensors"):
        StepReader(open_step(path, LOCAL))


def test_a_damaged_later_block_is_found_when_it_is_read(tmp_path, state):
    weights, _ = state
    path = save_once(tmp_path, weights=shards_of(weights, Layout()), training=[])
    file = path / "training/residual.safetensors"
    flip(file)
    with StepReader(open_step(path, LOCAL)) as stream:
        stream.read_range("model/embed.weight", 0, 10)
        with pytest.raises(DamagedBlock, match=r"residual\.safetensors"):
            read_all(stream, "model/head.weight")
        read_all(stream, "model/embed.weight")


def tensors_of_all_dtypes():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=generator) * 50
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    return {str(kind): values.to(kind) for kind in kinds} | {
        "f8": values.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def test_a_hugging_face_directory(tmp_path):
    tensors = tensors_of_all_dtypes()
    save_file(tensors, tmp_path / "model.safetensors")
    with DirectoryReader(tmp_path, "model/") as stream:
        assert stream.tensors.keys() == {f"model/{name}" for name in tensors}
        for name, tensor in tensors.items():
            assert torch.equal(bits(read_all(stream, f"model/{name}", 7)), bits(tensor))


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_files_of_the_index_and_no_others(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with DirectoryReader(tmp_path, "model/") as stream:
        assert stream.tensors.keys() == {"model/a", "model/b"}
        assert read_all(stream, "model/a").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("weight_map", "error"),
    [
        ({"a": "model-2.safetensors"}, MissingError),
        ({"a": "../model-1.safetensors"}, CorruptError),
        ({"a": 3}, CorruptError),
        ({"a": ["x"]}, CorruptError),
        ([], CorruptError),
        ({}, MissingError),
    ],
)
def test_a_wrong_index(tmp_path, weight_map, error):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(error, match=str(tmp_path)):
        DirectoryReader(tmp_path, "model/")


def test_a_directory_without_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(MissingError) as caught:
        DirectoryReader(tmp_path, "model/")
    assert "pytorch_model.bin" in str(caught.value)


def test_a_tensor_in_two_files(tmp_path):
    for number in (1, 2):
        save_file({"a": torch.ones(2)}, tmp_path / f"model-{number}.safetensors")
    with pytest.raises(CorruptError, match="model/a"):
        DirectoryReader(tmp_path, "model/")


def test_an_unknown_dtype(tmp_path):
    header = b'{"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(IncompatibleError):
        DirectoryReader(tmp_path, "model/")


def test_a_file_that_shrinks(tmp_path):
    save_file({"a": torch.ones(2000)}, tmp_path / "model.safetensors")
    with DirectoryReader(tmp_path, "model/") as stream:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(CorruptError):
            read_all(stream, "model/a")


def test_a_directory_of_links_as_in_a_hubs_cache(tmp_path):
    blobs, links = save_tiny(tmp_path / "blobs"), tmp_path / "links"
    links.mkdir()
    for path in blobs.iterdir():
        (links / path.name).symlink_to(path)
    with DirectoryReader(blobs) as plain, DirectoryReader(links) as linked:
        for key, described in plain.tensors.items():
            both = (each.read_range(key, 0, described.elements) for each in (plain, linked))
            assert torch.equal(*both), key
