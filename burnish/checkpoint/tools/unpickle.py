"""The child process that unpickles other programs' checkpoints, and does nothing else.

`burnish.checkpoint.tools.import_pickled` starts it with an empty directory to write to, and has it give up
writing anywhere else before this module, and torch with its threads, is imported. Files are
unpickled with torch's `weights_only`, DCP's metadata with a list of allowed classes. It leaves
safetensors files and `pieces.json`, which its parent reads as suspiciously as any file. Not to be
imported elsewhere.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from burnish.boxes.tensor_reader import dtype_name
from burnish.files.safetensors import build_header

PIECES = "pieces.json"
"""What lies where: a list of {file, tensor, name, shape, offsets}."""

_CHUNK = 1 << 22

_Found = tuple[str, list[int], list[int], Tensor]
"""Name in the state dict, global shape, offsets, elements (a plain tensor)."""


def convert(
    kind: str, source: Path, files: list[str], names: Collection[str], target: Path
) -> None:
    """Write the tensors that have one of these names, behind any prefix, to `target`."""
    read = {"dcp": _dcp, "torch_dist": _dcp, "verl": _verl}[kind]
    pieces: list[dict[str, Any]] = []
    for number, found in enumerate(read(source, files)):
        wanted = [each for each in found if known_part(each[0], names)]
        if wanted:
            pieces += _write(target, f"{number:05d}.safetensors", wanted)
    (target / PIECES).write_text(json.dumps(pieces))


def known_part(key: str, names: Collection[str]) -> str:
    """The longest end of a key, from a dot on, that is one of the names; "" where there is none."""
    while key and key not in names:
        key = key.partition(".")[2]
    return key


def _verl(source: Path, files: list[str]) -> Iterator[list[_Found]]:
    """Each rank's file: plain tensors, and DTensors with the rank's place in their mesh."""
    for rank, name in enumerate(files):
        state = torch.load(source / name, map_location="cpu", mmap=True, weights_only=True)
        yield [
            (key, *_place(key, value, rank))
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]


def _place(key: str, value: Any, rank: int) -> tuple[list[int], list[int], Any]:
    """Global shape, offsets and elements of a rank's tensor. FSDP cuts as `torch.chunk` does."""
    shape = list(value.shape)
    if not isinstance(value, DTensor):
        return shape, [0] * len(shape), value.detach()
    mesh = value.device_mesh.mesh
    [coordinate] = (mesh == rank).nonzero().tolist()
    offsets, sizes = [0] * len(shape), list(shape)
    for placement, position, ranks in zip(value.placements, coordinate, mesh.shape, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise ValueError(f"{key} is {placement}, which is no part of a tensor")
        dim = placement.dim
        piece = -(-sizes[dim] // ranks)
        start = min(position * piece, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(piece, sizes[dim] - start)
    local = value._local_tensor.detach()
    if list(local.shape) != sizes:
        raise ValueError(f"{key} has {list(local.shape)} on rank {rank}, not {sizes}")
    return shape, offsets, local


def _dcp(source: Path, files: list[str]) -> Iterator[list[_Found]]:
    """Each chunk of each tensor that the metadata tells of."""
    with (source / ".metadata").open("rb") as opened:
        metadata = _MetadataUnpickler(opened).load()
    places = {(each.fqn, each.offset): info for each, info in metadata.storage_data.items()}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            info = places[key, chunk.offsets]
            if info.relative_path not in files or getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{key} is in {info.relative_path!r}, in a way that is not handled"
                )
            with (source / info.relative_path).open("rb", buffering=0) as opened:
                data = io.BufferedReader(_Range(opened, info.offset, info.length))
                value = torch.load(data, map_location="cpu", weights_only=True)
            if list(value.shape) != list(chunk.sizes):
                raise ValueError(f"{key} has {list(value.shape)}, not {list(chunk.sizes)}")
            yield [(key, list(tensor.size), list(chunk.offsets), value.detach())]


class _Range(io.RawIOBase):
    """Bytes of an open file as a file of their own, so that what is in them is read straight to its place."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into the buffer what the system gives at once; how many bytes they were, 0 at the end."""
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(wanted) or 0
        self._at += count
        return count


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles what DCP's metadata is made of; any other class is refused."""

    _ALLOWED = frozenset(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ) | frozenset(  # Megatron's holds the plan that it was saved by
        ("torch.distributed.checkpoint.planner", name)
        for name in (
            "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
        )
    ) | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """A class by name."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in DCP's metadata")
        return super().find_class(module, name)


def _write(target: Path, name: str, found: list[_Found]) -> list[dict[str, Any]]:
    """A safetensors file of these tensors, each written in pieces; where it is of the whole."""
    header, _ = build_header(
        [
            (str(number), dtype_name(value.dtype, key), tuple(value.shape))
            for number, (key, *_, value) in enumerate(found)
        ],
        {},
    )
    with (target / name).open("xb") as out:
        out.write(header)
        for *_, value in found:
            flat = value.contiguous().view(-1)
            for start in range(0, len(flat), _CHUNK):
                out.write(flat[start : start + _CHUNK].view(torch.uint8).numpy().data)
    return [
        {"file": name, "tensor": str(number), "name": key, "shape": shape, "offsets": offsets}
        for number, (key, shape, offsets, _) in enumerate(found)
    ]
