import pytest
import torch
from safetensors.torch import load_file, save_file

from burnish.boxes.tensor_reader import DirectoryReader
from burnish.checkpoint.kept import KeptFile
from burnish.errors import CorruptError

TENSORS = {
    "a": torch.randn(300, 7).bfloat16(),
    "b": torch.tensor(3.5, dtype=torch.float64),
    "c": torch.zeros(0, 4),
    "d": torch.arange(-5, 5, dtype=torch.int8),
    "e": torch.tensor([float("nan"), -0.0, float("inf")]),
}


def kept(directory):
    save_file(TENSORS, directory / "model.safetensors")
    with DirectoryReader(directory) as reader:
        return KeptFile.write(directory / "kept.safetensors", reader.tensors, reader.read_range)


def test_a_copy_has_the_same_bytes(tmp_path):
    file = kept(tmp_path)
    for found in (file.tensors(), load_file(file.path)):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            flat = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
            assert torch.equal(*flat)


@pytest.mark.parametrize("at", [2, -1])
def test_a_changed_byte_is_found(tmp_path, at):
    file = kept(tmp_path)
    data = bytearray(file.path.read_bytes())
    data[at] ^= 1
    file.path.write_bytes(data)
    with pytest.raises(CorruptError):
        file.tensors()


def test_a_failed_copy_leaves_the_one_before(tmp_path):
    file = kept(tmp_path)

    def fails(name, start, stop):
        raise CorruptError(f"{name} is damaged")

    with DirectoryReader(tmp_path) as reader, pytest.raises(CorruptError):
        KeptFile.write(file.path, reader.tensors, fails)
    assert file.tensors().keys() == TENSORS.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "kept.safetensors"}
