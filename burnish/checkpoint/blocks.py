"""How tensors lie in files, and files in blocks.

All of it is a pure function of the tensors' names, dtypes and shapes, so every rank computes the
same, and the files are the same bytes whatever number of ranks writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from burnish.boxes.box import Box
from burnish.checkpoint.manifest import BLOCK_BYTES, MAX_BLOCK_BYTES
from burnish.checkpoint.tensor_sets import MODEL, path_of
from burnish.files.safetensors import DTYPE_BITS, TensorEntry, build_header
from burnish.files.strict_json import encode_json
from burnish.models.lora.adapter_names import ADAPTER_WEIGHTS, is_adapter

MAX_FILE_BYTES = 4 << 30
"""A set of tensors is divided into files of about this size; a larger tensor has one to itself."""
MOST_BLOCKS = 1 << 19
"""More blocks than these are made larger: the manifest, which all ranks read, has a hash for each."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it will be on disk."""

    tensor_set: str
    """The set it belongs to, which names the files: "model", "residual", "exp_avg", "critic/model", ..."""
    name: str
    """Canonical name of the weight it is, or is a slot of."""
    dtype: str
    """The format's name of its dtype."""
    shape: tuple[int, ...]
    """Global shape."""

    @property
    def key(self) -> str:
        """Names it among all tensors of the step."""
        return f"{self.tensor_set}/{self.name}"

    @property
    def size(self) -> int:
        """Its bytes."""
        return Box((0,) * len(self.shape), self.shape).elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file that is about to be written, or was."""

    path: str
    """Below the step, with forward slashes."""
    tensor_set: str
    """The set its tensors belong to."""
    header: bytes
    """Its first bytes."""
    entries: tuple[TensorEntry, ...]
    """Its tensors, in the order of their bytes."""
    size: int
    """Its bytes, header included."""


@dataclass(frozen=True, slots=True)
class Block:
    """A range of one file that has one writer and one hash."""

    file: int
    """Index among the planned files."""
    number: int
    """Index among the file's blocks."""
    start: int
    """First byte in the file."""
    stop: int
    """One past the last."""


def plan_files(
    tensors: Iterable[Stored], max_file_bytes: int = MAX_FILE_BYTES
) -> tuple[list[PlannedFile], dict[str, bytes]]:
    """The safetensors files for these tensors, and the index files that belong to them by path.

    Sets follow each other by path, tensors within a set by name; names follow Hugging Face's
    (`model.safetensors`, or `model-00001-of-0000N.safetensors` with an index; the weights of an
    adapter are in the one file that PEFT looks for). Within a file the
    wider dtypes come first, so that no element lies across two blocks.
    """
    sets: dict[str, list[Stored]] = {}
    for tensor in sorted(tensors, key=lambda t: (path_of(t.tensor_set), t.name)):
        sets.setdefault(tensor.tensor_set, []).append(tensor)
    files: list[PlannedFile] = []
    indices: dict[str, bytes] = {}
    for tensor_set, members in sets.items():
        path = path_of(tensor_set)
        directory, _, stem = path.rpartition("/")
        shares = _shares(members, max_file_bytes)
        if stem == MODEL and is_adapter(tensor.name for tensor in members):
            stem, shares = ADAPTER_WEIGHTS, [members]
        weight_map: dict[str, str] = {}
        for number, share in enumerate(shares, start=1):
            numbered = f"{stem}-{number:05d}-of-{len(shares):05d}" if len(shares) > 1 else stem
            files.append(_file(f"{directory}/{numbered}.safetensors", tensor_set, share))
            weight_map |= {tensor.name: f"{numbered}.safetensors" for tensor in share}
        if len(shares) > 1:
            total = sum(tensor.size for tensor in members)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            indices[f"{path}.safetensors.index.json"] = encode_json(index)
    return files, indices


def block_bytes_for(files: Iterable[PlannedFile], most: int = MOST_BLOCKS) -> int:
    """The size of a step's blocks: `BLOCK_BYTES` up to 2 TiB, then doubled as often as it takes, up to `MAX_BLOCK_BYTES`."""
    total, size = sum(file.size for file in files), BLOCK_BYTES
    while total > most * size and size < MAX_BLOCK_BYTES:
        size *= 2
    return size


def blocks_of(file: int, size: int, block_bytes: int) -> list[Block]:
    """The blocks of the file with this index and size, in order."""
    return [
        Block(file, number, start, min(start + block_bytes, size))
        for number, start in enumerate(range(0, size, block_bytes))
    ]


def _shares(members: list[Stored], max_file_bytes: int) -> list[list[Stored]]:
    shares: list[list[Stored]] = [[]]
    filled = 0
    for tensor in members:
        if shares[-1] and filled + tensor.size > max_file_bytes:
            shares.append([])
            filled = 0
        shares[-1].append(tensor)
        filled += tensor.size
    return shares


def _file(path: str, tensor_set: str, members: list[Stored]) -> PlannedFile:
    ordered = sorted(members, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name))
    header, entries = build_header(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered], {"format": "pt"}
    )
    placed = tuple(entries.values())
    end = placed[-1].end if placed else len(header)
    return PlannedFile(path, tensor_set, header, placed, end)
