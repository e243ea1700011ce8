"""The child process that unpickles other programs' checkpoints. Do not import it elsewhere.

`burnish.checkpoint.tools.import_pickled` starts the child. It gives up writing outside an empty directory before it imports
this module, and torch with its threads. The parent distrusts the safetensors files that the child leaves.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from burnish.boxes.tensor_reader import dtype_name
from burnish.files.safetensors import build_header

_CHUNK = 1 << 22  # elements
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
_DCP = "torch.distributed.checkpoint"
# Classes and functions that DCP's metadata is made of, by module.
_ALLOWED = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.planner": {  # Megatron's metadata holds the plan that it was saved by
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path"},
}  # fmt: skip

_Piece = tuple[str, list[int], list[int], Tensor]
"""A part of a tensor: name in the state dict, global shape, offsets, elements."""


def convert(
    kind: str, source: Path, files: list[str], names: Collection[str], target: Path
) -> None:
    """Write the tensors that have one of these names, behind any prefix, to safetensors files.

    Names there are JSON: name in the state dict, global shape, offsets.
    """
    read = _verl if kind == "verl" else _dcp
    for number, pieces in enumerate(read(source, files, names)):
        _write(target / f"{number:05d}.safetensors", pieces)


def without_numbers(name: str) -> str:
    """Return a name without the numbers of layers and experts."""
    return _NUMBER.sub("", name)


def known_part(key: str, names: Collection[str]) -> str:
    """Return the longest end of a key that is one of the names, apart from numbers, or ""."""
    while key and without_numbers(key) not in names:
        key = key.partition(".")[2]
    return key


def _verl(source: Path, files: list[str], names: Collection[str]) -> Iterator[list[_Piece]]:
    for rank, name in enumerate(files):
        state = torch.load(source / name, map_location="cpu", mmap=True, weights_only=True)
        yield [
            (key, *_place(key, value, rank))
            for key, value in state.items()
            if isinstance(value, Tensor) and known_part(key, names)
        ]


def _place(key: str, value: Tensor, rank: int) -> tuple[list[int], list[int], Tensor]:
    shape = list(value.shape)
    if not isinstance(value, DTensor):
        return shape, [0] * len(shape), value.detach()
    if not all(type(placement) in (Shard, Replicate) for placement in value.placements):
        raise ValueError(f"{key} is {value.placements}, which is not a part of a tensor")
    mesh = value.device_mesh.mesh
    [coordinate] = (mesh == rank).nonzero().tolist()
    sizes, offsets = _compute_local_shape_and_global_offset(
        value.shape, mesh.shape, coordinate, value.placements
    )
    local = value._local_tensor.detach()
    if local.shape != sizes:
        raise ValueError(f"{key} has {list(local.shape)} on rank {rank}, not {list(sizes)}")
    return shape, list(offsets), local


def _dcp(source: Path, files: list[str], names: Collection[str]) -> Iterator[list[_Piece]]:
    with (source / ".metadata").open("rb") as opened:
        metadata = _MetadataUnpickler(opened).load()
    places = {(each.fqn, each.offset): info for each, info in metadata.storage_data.items()}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or not known_part(key, names):
            continue
        for chunk in tensor.chunks:
            info = places[key, chunk.offsets]
            if info.relative_path not in files or getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{key} is in {info.relative_path!r}, in a way that is not handled"
                )
            with (source / info.relative_path).open("rb") as opened:
                data = cast(IO[bytes], _create_file_view(opened, info.offset, info.length))
                value = torch.load(data, map_location="cpu", weights_only=True)
            if list(value.shape) != list(chunk.sizes):
                raise ValueError(f"{key} has {list(value.shape)}, not {list(chunk.sizes)}")
            yield [(key, list(tensor.size), list(chunk.offsets), value.detach())]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in DCP's metadata")
        return super().find_class(module, name)


def _write(path: Path, pieces: list[_Piece]) -> None:
    header, _ = build_header(
        [
            (json.dumps([name, shape, offsets]), dtype_name(value.dtype, name), tuple(value.shape))
            for name, shape, offsets, value in pieces
        ],
        {},
    )
    with path.open("xb") as out:
        out.write(header)
        for name, *_, value in pieces:
            if value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"{name} has more elements than its file holds")
            flat = value.contiguous().view(-1)
            for start in range(0, len(flat), _CHUNK):
                out.write(flat[start : start + _CHUNK].view(torch.uint8).numpy().data)
