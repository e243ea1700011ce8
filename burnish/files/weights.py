"""The files that hold the weights of a Hugging Face model directory: which they are, and what names their content."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from burnish.errors import CorruptError, MissingError, few
from burnish.files.safetensors import read_header
from burnish.files.strict_json import parse_json, shortened

SUFFIX = ".safetensors"
"""Ends the names of tensor files."""
INDEX = f"model{SUFFIX}.index.json"
"""Which tensor is in which file of a Hugging Face directory."""

_SINGLE = f"model{SUFFIX}"
_PART = re.compile(rf"(.+)-[0-9]{{5}}-of-([0-9]{{5}}){re.escape(SUFFIX)}")
_INDEX_LIMIT = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
# Of each file, evenly over it.


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up a model or an adapter: those of the index, `model.safetensors`, or all there are.

    Raises `MissingError` where there are none or one is missing, `CorruptError` for an index that is
    none, or that names what lies elsewhere.
    """
    index = directory / INDEX
    if index.is_file():
        names = _indexed(index)
    elif (directory / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        names = _of_all_parts({path.name for path in directory.glob(f"*{SUFFIX}")})
    absent = [name for name in names if not (directory / name).is_file()]
    if absent or not names:
        found = few(sorted(path.name for path in directory.glob("*")))
        raise MissingError(
            f"{directory} lacks {few(absent) or 'weights'}",
            have=found or "an empty or absent directory",
            want=f"{_SINGLE}, or {INDEX} and its files; pickled weights are never read",
            do="get the missing files, or give another directory",
        )
    return [directory / name for name in names]


def _indexed(index: Path) -> list[str]:
    """The names that an index has for files beside it."""
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name:
            raise CorruptError(
                f"{index} names files outside its directory",
                have=shortened(name),
                want="names of files beside it",
                do="get the file again, from someone you trust",
            )
    return names


def indexed_tensors(directory: Path) -> set[str]:
    """The tensors that a model's index names; none without one. Raises `CorruptError` for an index that is none."""
    index = directory / INDEX
    return set(_weight_map(index)) if index.is_file() else set()


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        if index.stat().st_size > _INDEX_LIMIT:
            raise ValueError(f"more than {_INDEX_LIMIT} bytes")
        files = parse_json(index.read_bytes(), str(index))["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise TypeError("names of files that are no text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"{index} is not an index of weights", have=error, do="get the file again"
        ) from error
    found: dict[str, str] = files
    return found


def _of_all_parts(names: set[str]) -> list[str]:
    """The files, with those that are numbered as parts of a whole and not there."""
    for name in list(names):
        if match := _PART.fullmatch(name):
            stem, count = match[1], int(match[2])
            names |= {f"{stem}-{n:05d}-of-{count:05d}{SUFFIX}" for n in range(1, count + 1)}
    return sorted(names)


def model_digest(directory: Path) -> str:
    """sha256, in hex, of config.json and of each file of weights: its name, size and header, and a sample of its bytes.

    Models of one family have the same headers, and differ in their bytes nearly everywhere. Reads
    256 KiB of each file. Raises as `weight_files` does.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        size, first = path.stat().st_size, read_header(path).size
        digest.update(f"{path.name} {size} {first}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(first))
            for number in range(_SAMPLES):
                file.seek(first + (size - first) * number // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
