"""The files that hold the weights of a Hugging Face model directory: which they are, and what names their content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from burnish.errors import CorruptError, MissingError
from burnish.files.safetensors import read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
# Of each file, evenly over it.


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model, by its index or its single file.

    Raises `MissingError` where there are none or one is missing, `CorruptError` for an index that is none.
    """
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(
                {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{index} is not an index of weights", have=error) from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CorruptError(f"{index} names files outside its directory", have=outside[0])
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise MissingError(
                f"{directory} lacks {len(missing)} of the {len(names)} files its index names",
                have=f"no {few(missing)}",
                do="get the missing files",
            )
        return [directory / name for name in names]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    found = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []
    raise MissingError(
        f"{directory} has no weights that Burnish reads",
        have=few(found) if found else "an empty or absent directory",
        want=f"{_SINGLE}, or {_INDEX} and its files (pickled weights are never read)",
        do="set model.path to a directory with safetensors, or model.fresh for new weights",
    )


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


def few(names: list[str]) -> str:
    """The first of the names, and how many there are, for a message."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names)} in all)"
