"""Which files of a directory are the model's weights."""

import json

import pytest

from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import INDEX, unread_files, weight_files


def names(directory):
    return [path.name for path in weight_files(directory)]


def touch(directory, *files):
    for name in files:
        (directory / name).touch()


def write_index(directory, *files):
    weight_map = {f"t{number}": name for number, name in enumerate(files)}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_the_index_goes_before_one_file_and_that_before_all(tmp_path):
    touch(tmp_path, "b.safetensors", "a.safetensors", "pytorch_model.bin")
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    touch(tmp_path, "model.safetensors")
    assert names(tmp_path) == ["model.safetensors"]
    write_index(tmp_path, "model.safetensors", "b.safetensors")
    assert names(tmp_path) == ["b.safetensors", "model.safetensors"]


@pytest.mark.parametrize(
    ("listed", "files"),
    [
        (("a.safetensors",), ("a.safetensors", "model.safetensors")),
        (PARTS, (*PARTS, "model.safetensors")),
        (PARTS, ("model.safetensors",)),
        (PARTS, (*PARTS, "model-00001-of-00003.safetensors")),
        (PARTS, (*PARTS, "model-00003-of-00003.safetensors", "consolidated.safetensors")),
        ((), (*PARTS, "model.safetensors")),
        (PARTS, (*PARTS, "adapter_config.json", "adapter_model.safetensors")),
        ((), ("model.safetensors", "adapter_config.json")),
        ((), (*PARTS, "adapter_config.json")),
    ],
)
def test_two_sets_of_weights_are_refused(tmp_path, listed, files):
    touch(tmp_path, *files)
    if listed:
        write_index(tmp_path, *listed)
    with pytest.raises(IncompatibleError) as caught:
        weight_files(tmp_path)
    added = set(files).difference(listed) - {"consolidated.safetensors", *PARTS[1:]}
    assert any(name in str(caught.value.have) for name in added)
    assert caught.value.do


@pytest.mark.parametrize("is_indexed", [True, False])
def test_what_published_models_hold_beside_their_weights_is_named_and_not_read(
    tmp_path, is_indexed
):
    beside = {
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "model.fp16.safetensors.index.json",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "model-Q4_K_M.gguf",
    }
    other = ("training_args.bin", "tokenizer.json", "optimizer.pt", "pytorch_model.bin.index.json")
    touch(tmp_path, *PARTS, *beside, *other, "pytorch_model-00001-of-00002.bin")
    if is_indexed:
        write_index(tmp_path, *PARTS)
    assert names(tmp_path) == [*PARTS]
    assert set(unread_files(tmp_path)) == beside | {"pytorch_model-*-of-00002.bin"}


def test_an_adapters_weights(tmp_path):
    touch(tmp_path, "adapter_model.safetensors", "adapter_config.json")
    assert names(tmp_path) == ["adapter_model.safetensors"]


def test_an_index_behind_a_link(tmp_path):
    """As a hub's cache has it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "blobs/1").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    (tmp_path / "model" / INDEX).symlink_to("../blobs/1")
    touch(tmp_path / "model", "a.safetensors")
    assert names(tmp_path / "model") == ["a.safetensors"]


def test_what_an_index_lacks_is_named(tmp_path):
    weight_map = {f"t{i}": f"model-{i:02d}.safetensors" for i in range(12)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(MissingError, match=r"(?s)model-00\.safetensors.*7"):
        weight_files(tmp_path)


def test_no_directory(tmp_path):
    with pytest.raises(MissingError) as caught:
        weight_files(tmp_path / "nowhere")
    assert caught.value.do


def test_an_index_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(CorruptError, match=r"index\.json.*\n.* 67108864 "):
        weight_files(tmp_path)
