"""The small files of a Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.steps import step_number
from burnish.errors import IncompatibleError, MissingError, UsageError, few
from burnish.files.durable import read_whole
from burnish.files.safetensors import INDEX, code_files
from burnish.files.storage import LOCAL, Source
from burnish.files.strict_json import parse_object

CONFIG = "config.json"
"""The model's configuration."""

_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
_TEMPLATES = "additional_chat_templates"
_LIMIT = 64 << 20
_DTYPE_KEYS = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"


def require_outside_steps(target: Path, storage: Source) -> None:
    """Raise `UsageError` for a target in a committed step, which writing would damage."""
    for parent in target.resolve().parents:
        if step_number(parent.name) is not None and storage.kind(parent / COMMIT) is not None:
            raise UsageError(
                f"{target} lies in the checkpoint {parent}",
                want="a directory outside of it, because an extra file makes a checkpoint invalid",
                do="give another place",
            )


def read_assets(directory: Path) -> dict[str, bytes]:
    """Return the small files of a Hugging Face directory by name.

    Raises `MissingError` without config.json, `IncompatibleError` for a large file, `UsageError` for code linked from
    elsewhere.
    """
    paths = [path for path in directory.glob("*") if path.suffix in _SUFFIXES]
    paths += [*(directory / _TEMPLATES).glob("*.jinja"), *code_files(directory)]
    names = {path.relative_to(directory).as_posix(): path for path in sorted(paths)}
    names.pop(INDEX, None)
    if CONFIG not in names:
        raise MissingError(
            f"{directory} has no {CONFIG}",
            have=few(sorted(path.name for path in directory.glob("*"))) or "nothing",
            want="a Hugging Face directory",
            do="give the directory of the model that the weights are of",
        )
    assets = {}
    for name, path in names.items():
        if not path.is_file():
            raise MissingError(
                f"{path} is not a file",
                have="a link to nothing, a directory or a device",
                want="a file of the model",
                do="get it again, or remove it where the model does not need it",
            )
        try:
            # A hub's cache is made of links, so links are followed.
            assets[name] = read_whole(LOCAL, path.resolve(), _LIMIT)
        except ValueError as error:
            raise IncompatibleError(
                f"{path} is too large to be copied",
                have=error,
                want=f"at most {_LIMIT} bytes",
                do="move it out of the directory where the model does not need it",
            ) from error
    return assets


def with_dtype(data: bytes, dtype: torch.dtype, what: str) -> bytes:
    """Return config.json with this dtype, and without quantization. Raises `CorruptError` naming `what` if it is not JSON."""
    name = str(dtype).partition(".")[2]
    config: dict[str, Any] = _named(parse_object(data, what), name)
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = name
    return (json.dumps(config, indent=2) + "\n").encode()


def _named(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: name if key in _DTYPE_KEYS and isinstance(inner, str) else _named(inner, name)
        for key, inner in value.items()
        if key != _QUANTIZATION
    }
