"""Headers of safetensors files: read strictly, and built. No torch here.

A file is 8 bytes of header length (little endian), a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from burnish.errors import CorruptError, IncompatibleError, MissingError, UsageError, few, refusing
from burnish.files.strict_json import clipped, parse_json, parse_object, shortened

ALIGN = 8
"""Tensors' bytes begin at a multiple of this at least."""
MAX_HEADER_BYTES = 16 << 20
"""Longer headers are refused, so that reading a hostile file takes less than a second and 256 MB."""
MAX_TENSORS = 100_000
"""Files with more tensors are refused too. Published models have some thousands of tensors in a file. An adapter for all
experts of the largest model has up to 90,000."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype the format knows."""

_MAX_ELEMENTS = 1 << 63
_MAX_DIMS = 16
# Most occurrences of each mark in a header. A tensor has a pair of braces, two lists and ten quotation marks.
_MAX_MARKS = {
    b"{": MAX_TENSORS + 2,
    b"[": 2 * MAX_TENSORS,
    b",": (_MAX_DIMS + 4) * MAX_TENSORS,
    b'"': 12 * MAX_TENSORS,
}
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name of its dtype: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the *file*."""
    end: int
    """One past the last byte, counted from the start of the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header."""

    entries: dict[str, TensorEntry]
    """Tensors by name, in the order of their bytes."""
    size: int
    """Bytes before the first tensor: 8 and the JSON text."""


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read a file's header and check it against the file.

    Raises `MissingError`, and `CorruptError` naming file and tensor for overlaps, holes, wrong sizes, unknown dtypes and so
    on.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingError(
            f"there is no file {path}", want="a safetensors file", do="correct the path"
        )
    file_size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        text = file.read(header_size(path, prefix, file_size) - 8)
    return parse_header(path, prefix + text, file_size)


def header_size(path: PurePath, prefix: bytes | bytearray, file_size: int) -> int:
    """Return the bytes before the first tensor, from a file's first 8 or more. Raises `CorruptError`."""
    if prefix[:8] == b"version ":
        raise CorruptError(
            f"{path} is only a pointer of Git LFS",
            have=f"{file_size} bytes of text",
            want="the file itself",
            do="run `git lfs pull` there, or get the file again",
        )
    size = 8 + int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or size > file_size:
        raise _corrupt(path, "is truncated", f"{file_size} bytes", f"{size} or more")
    if size - 8 > MAX_HEADER_BYTES:
        raise _corrupt(path, "has a huge header", f"{size - 8} bytes", f"{MAX_HEADER_BYTES}")
    return size


def parse_header(path: PurePath, data: bytes, file_size: int) -> Header:
    """Return the header in a file's first bytes. Raises as `read_header` does."""
    start = len(data)
    entries = sorted(_parse(path, data[8:], start), key=attrgetter("begin", "end"))
    _check_cover(path, entries, start, file_size)
    return Header({entry.name: entry for entry in entries}, start)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    align: int = ALIGN,
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return a file's header for these (name, dtype, shape), and each tensor's range. Data starts at a multiple of `align`.

    Raises `ValueError` for a duplicate name, `IncompatibleError` for too many tensors.
    """
    table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if name in table or name == _METADATA:
            raise ValueError(f"two tensors are named {name!r}")
        end = position + _bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MAX_HEADER_BYTES or len(table) > MAX_TENSORS:
        raise IncompatibleError(
            "a file of weights would have too many tensors to be read again",
            have=f"{len(table)} tensors, {len(text)} bytes of header",
            want=f"{MAX_TENSORS} and {MAX_HEADER_BYTES} at most",
            do="put them into several files, or train fewer layers (model.lora.targets)",
        )
    start = 8 + len(text)
    entries = {
        name: TensorEntry(
            name,
            value["dtype"],
            tuple(value["shape"]),
            start + value["data_offsets"][0],
            start + value["data_offsets"][1],
        )
        for name, value in table.items()
        if name != _METADATA
    }
    return len(text).to_bytes(8, "little") + text, entries


def _corrupt(path: PurePath, what: str, have: object = None, want: object = None) -> CorruptError:
    if have is not None:
        have = clipped(have) if isinstance(have, str) else shortened(have)
    return CorruptError(f"{path} {clipped(what)}", have=have, want=want, do="get the file again")


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype} of shape {shape} does not fill whole bytes")
    return bits // 8


def _parse(path: PurePath, data: bytes, start: int) -> list[TensorEntry]:
    for mark, most in _MAX_MARKS.items():  # parsed JSON may take fifty times its size in memory
        if (count := data.count(mark)) > most:
            have = f"{count} times {mark.decode()}"
            raise _corrupt(path, "has a header with too many parts", have, f"{most} at most")
    table = parse_object(data, f"the header of {path}")
    metadata = table.pop(_METADATA, {})
    texts = metadata.values() if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise _corrupt(path, "has metadata that is not text by name", metadata)
    if len(table) > MAX_TENSORS:
        raise _corrupt(path, "has too many tensors", len(table), f"{MAX_TENSORS} at most")
    try:
        "".join(table).encode()
    except UnicodeEncodeError as error:
        raise _corrupt(path, "has a tensor whose name is not valid text", error) from error
    return [_entry(path, name, value, start) for name, value in table.items()]


def _entry(path: PurePath, name: str, value: Any, start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise _corrupt(path, f"describes tensor {name} wrongly", value)
    dtype = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _corrupt(path, f"gives tensor {name} an unknown dtype", dtype, ", ".join(DTYPE_BITS))
    elements = math.prod(shape) if _are_counts(shape, _MAX_DIMS) else _MAX_ELEMENTS
    if elements >= _MAX_ELEMENTS:
        raise _corrupt(path, f"gives tensor {name} an impossible shape", shape)
    if not _are_counts(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(path, f"gives tensor {name} impossible offsets", offsets)
    begin, end = offsets
    if DTYPE_BITS[dtype] * elements != 8 * (end - begin):
        have = f"{end - begin} bytes"
        raise _corrupt(
            path, f"gives tensor {name} a size that is not its shape's", have, (dtype, shape)
        )
    return TensorEntry(name, sys.intern(dtype), tuple(shape), start + begin, start + end)


def _are_counts(value: Any, most: int) -> bool:
    if not isinstance(value, list) or len(value) > most:
        return False
    for item in value:  # noqa: SIM110 - all() of a generator takes twice as long for the usual two
        if type(item) is not int or item < 0:
            return False
    return True


def _check_cover(path: PurePath, entries: list[TensorEntry], start: int, file_size: int) -> None:
    position = start
    for entry in entries:
        if entry.begin != position:
            what = "overlaps another" if entry.begin < position else "leaves a hole before it"
            raise _corrupt(path, f"has a tensor {entry.name} that {what}", entry.begin, position)
        position = entry.end
    if position != file_size:
        what = "is truncated" if file_size < position else "has bytes that belong to no tensor"
        raise _corrupt(path, what, f"{file_size} bytes", f"{position} bytes")


SUFFIX = ".safetensors"
"""Suffix of tensor files."""
INDEX = f"model{SUFFIX}.index.json"
"""The file that says which tensor is in which file of a Hugging Face directory."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file in which PEFT describes an adapter: rank, layers, the model that it belongs to."""
ADAPTER_WEIGHTS = "adapter_model"
"""Name, without suffix, of PEFT's one file of an adapter's tensors."""
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors."""

_SINGLE = f"model{SUFFIX}"
_STEM = "model"
# Weights in formats that are never read.
_PICKLED = re.compile(
    r"(pytorch_model|adapter_model|tf_model|flax_model|consolidated|model)\b.*\.(bin|pth?|h5|msgpack)|.+\.gguf"
)
_PART = re.compile(rf"(.+)-[0-9]{{5}}-of-([0-9]{{5}}){re.escape(SUFFIX)}")
_INDEX_LIMIT = 64 << 20
# Samples of each file, evenly spaced, and the bytes of a sample.
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model or adapter: the index's, `model.safetensors`, its parts, or all.

    Raises `MissingError` if one or all are missing, `CorruptError` for a broken index, and `IncompatibleError` for two sets
    of weights.
    """
    present_names = {path.name for path in directory.glob("*")}
    matches = filter(None, map(_PART.fullmatch, present_names))
    own_names = {match[0] for match in matches if match[1] == _STEM}
    if INDEX in present_names:
        names = sorted(set(weight_map(directory).values()))
    elif _SINGLE in present_names:
        names = [_SINGLE]
    else:
        names = _with_missing_parts(
            own_names or {name for name in present_names if name.endswith(SUFFIX)}
        )
    _require_one_model(directory, present_names, own_names, names)
    absent = [name for name in names if not (directory / name).is_file()]
    if absent or not names:
        present = few(sorted(present_names))
        raise MissingError(
            f"{directory} lacks {few(absent) or 'weights'}",
            have=present or "an empty or absent directory",
            want=f"{_SINGLE}, or {INDEX} and its files; pickled weights are never read",
            do="get the missing files, or give another directory",
        )
    return [directory / name for name in names]


def _require_one_model(
    directory: Path, there: set[str], own: set[str], names: Sequence[str]
) -> None:
    """Raise `IncompatibleError` for files of which programs choose differently.

    transformers prefers `model.safetensors` to the index, vLLM the index; both put an adapter onto a model beside it.
    """
    whole = sorted(({INDEX, _SINGLE} & there) | own)
    others = sorted((own | ({_SINGLE} & there)) - set(names))
    if ADAPTER_CONFIG in there and whole:
        have = f"{ADAPTER_CONFIG} and {few(whole)}"
        do = "put the adapter into its own directory"
    elif others:
        read = f"{INDEX}, which lists {few(names)}," if INDEX in there else few(names)
        have = f"{read} and {few(others)}"
        do = "remove those that are not the model's"
    else:
        return
    raise IncompatibleError(
        f"{directory} holds two sets of weights, and programs differ in which they read",
        have=have,
        want="the weights of one model",
        do=do,
    )


def unread_files(directory: Path) -> list[str]:
    """Return the names of weights and indexes that lie beside a model's own and are not read; parts count as one."""
    read = {path.name for path in weight_files(directory)} | {INDEX}
    others = {
        path.name
        for path in directory.glob("*")
        if path.name.endswith((SUFFIX, f"{SUFFIX}.index.json")) or _PICKLED.fullmatch(path.name)
    }
    return sorted({re.sub(r"-[0-9]{5}-of-", "-*-of-", name) for name in others - read})


def weight_map(directory: Path) -> dict[str, str]:
    """Return each tensor's file from a model's index, if any. Raises `CorruptError`."""
    return _read_index(directory)[0]


def contradictions(directory: Path, entries: Iterable[tuple[str, TensorEntry]]) -> list[str]:
    """Return what a model's index says otherwise than its files' headers, given each tensor's file and entry."""
    listed, stated_size = _read_index(directory)
    if not listed:
        return []
    entries = list(entries)
    files = {entry.name: file for file, entry in entries}
    absent = sorted(listed.keys() - files.keys())
    moved = sorted(name for name, file in files.items() if listed.get(name, file) != file)
    total_size = sum(entry.end - entry.begin for _, entry in entries)
    problems = [f"no file holds {few(absent)}"] if absent else []
    problems += [f"{few(moved)} lies in another file"] if moved else []
    if stated_size not in (None, total_size):
        problems.append(f"it counts {stated_size} bytes, its files hold {total_size}")
    return problems


def _read_index(directory: Path) -> tuple[dict[str, str], Any]:
    """Return each tensor's file, and the stated number of bytes, if any."""
    index = directory / INDEX
    if not index.is_file():
        return {}, None
    with refusing(f"{index} is not an index of weights", CorruptError, do="get the file again"):
        if index.stat().st_size > _INDEX_LIMIT:
            raise ValueError(f"more than {_INDEX_LIMIT} bytes")
        parsed = parse_json(index.read_bytes(), str(index))
        tensor_files: dict[str, str] = parsed["weight_map"]
        metadata = parsed.get("metadata")
        outside = [name for name in set(tensor_files.values()) if Path(name).name != name]
    if outside:
        raise CorruptError(
            f"{index} names files outside its directory",
            have=shortened(min(outside)),
            want="names of files beside it",
            do="get the file again, from someone you trust",
        )
    return tensor_files, metadata.get("total_size") if isinstance(metadata, dict) else None


def _with_missing_parts(names: set[str]) -> list[str]:
    """Add missing files to those numbered as parts."""
    for name in list(names):
        if match := _PART.fullmatch(name):
            stem = match[1]
            count = int(match[2])
            names |= {f"{stem}-{n:05d}-of-{count:05d}{SUFFIX}" for n in range(1, count + 1)}
    return sorted(names)


def model_digest(directory: Path) -> str:
    """Return the sha256 of config.json and each weight file's name, size, header and 256 KiB of samples. Raises as
    `weight_files`.

    Models of one family have equal headers.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        size = path.stat().st_size
        first = read_header(path).size
        digest.update(f"{path.name} {size} {first}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(first))
            for number in range(_SAMPLES):
                file.seek(first + (size - first) * number // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def code_files(directory: Path) -> list[Path]:
    """Return a model's Python files. Raises `UsageError` for non-files, and links out of the directory except to a hub's cache."""
    home = directory.resolve()
    homes = [home] + [home.parents[1] / "blobs"] * (home.parent.name == "snapshots")
    paths = sorted(directory.glob("*.py"))
    for path in paths:
        if not path.is_file() or not any(map(path.resolve().is_relative_to, homes)):
            raise UsageError(
                f"{path} is not copied, because it is not a file of the model itself",
                have=f"a link to {path.resolve()}" if path.is_symlink() else "no regular file",
                do="put the file itself there, or remove it",
            )
    return paths
