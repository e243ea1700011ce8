"""Which files of a directory are the model's weights."""

import json

import pytest

from burnish.errors import CorruptError, MissingError
from burnish.files.safetensors import INDEX, weight_files


def names(directory):
    return [path.name for path in weight_files(directory)]


def touch(directory, *files):
    for name in files:
        (directory / name).touch()


def test_the_index_goes_before_one_file_and_that_before_all(tmp_path):
    touch(tmp_path, "b.safetensors", "a.safetensors", "pytorch_model.bin")
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    touch(tmp_path, "model.safetensors")
    assert names(tmp_path) == ["model.safetensors"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    assert names(tmp_path) == ["b.safetensors"]


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
