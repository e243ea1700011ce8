"""Copy a run's inputs from URLs to this machine before anything else begins.

The run records the configuration with the URLs and works with the paths of the copies. All processes of a machine get the
same copies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from burnish.config.schema import ModelConfig, RewardModelConfig, RunConfig
from burnish.data.columns import is_data
from burnish.distributed.environment import place_of
from burnish.errors import MissingError
from burnish.files.cache import Watch, local_files
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.files.urls import is_url
from burnish.tracking.progress import Progress

_WEIGHTS = ".safetensors"
_MODEL_SUFFIXES = frozenset({".json", _WEIGHTS, ".model", ".txt", ".jinja", ".py"})


def with_local_inputs(
    config: RunConfig, *, trains: bool = True, only_small: bool = False
) -> RunConfig:
    """Return the configuration with paths instead of URLs, and with rank and layers of the adapter that it starts from.

    Training data and a critic are copied only if it `trains`. With `only_small` data, critic and reward models keep their URLs, and
    a model behind a URL becomes a new one with the same config.json and tokenizer. Raises `MissingError` for missing files, and
    `BurnishError` if copying fails.
    """
    watch: Watch = Progress(config.tracking.progress and place_of(os.environ).layout.is_main).phase
    values = config.model_dump()
    model = values["model"]
    if only_small and _is_url(model["path"]):
        folder = local_directory(model["path"], watch, weights=False)
        model |= {"path": None, "fresh": str(folder / "config.json"), "lora": {}}
        model["tokenizer"] = model["tokenizer"] or str(folder)
    for section, setting in ((model, "path"), (model, "tokenizer"), (model["lora"], "path")):
        if _is_url(section.get(setting)):
            section[setting] = str(local_directory(section[setting], watch))
    for setting in ("chat_template", "fresh"):
        if _is_url(model[setting]):
            model[setting] = str(_file(model[setting], watch))
    for each in values["reward"]["functions"]:
        file, colon, name = each["function"].rpartition(":")
        if file.endswith(".py") and is_url(file):
            each["function"] = f"{_file(file, watch)}{colon}{name}"
    if not only_small:
        _copy_large(values, watch, trains=trains)
    local = RunConfig.model_validate(values)
    return local.model_copy(update={"model": _with_adapter(local.model)})


def _copy_large(values: Mapping[str, Any], watch: Watch, *, trains: bool) -> None:
    data, critic = values["data"], values["critic"]
    for judge in values["reward"]["models"]:
        if is_url(judge["path"]):  # the copy's directory has another name
            judge["name"] = RewardModelConfig(**judge).part_name
            judge["path"] = str(local_directory(judge["path"], watch))
    for setting in ("train", "validation") if trains else ("validation",):
        entries, data[setting] = data[setting], []
        for entry in entries:
            data[setting] += (
                map(str, local_files(entry, is_data, watch)) if is_url(entry) else [entry]
            )
    if trains and _is_url(critic["path"]):
        critic["path"] = str(local_directory(critic["path"], watch))


def _is_url(value: object) -> bool:
    return isinstance(value, str) and is_url(value)


def _with_adapter(model: ModelConfig) -> ModelConfig:
    if model.lora.path is None:
        return model
    described = Path(model.lora.path).expanduser() / ADAPTER_CONFIG
    if not described.is_file():
        raise MissingError(
            f"there is no adapter to go on from in {described.parent}",
            have=f"no {ADAPTER_CONFIG}" if described.parent.is_dir() else "no such directory",
            want=f"a directory with {ADAPTER_CONFIG}, for as long as the run goes on",
            do="set model.lora.path to one",
        )
    adapter_config = import_module("burnish.models.lora.adapter_config")
    found: ModelConfig = adapter_config.with_adapter(model, described.read_bytes())
    return found


def local_directory(url: str, watch: Watch | None = None, *, weights: bool = True) -> Path:
    """Copy a Hugging Face directory, its own code included. Raises `MissingError` if it has no files."""
    suffixes = _MODEL_SUFFIXES if weights else _MODEL_SUFFIXES - {_WEIGHTS}
    return local_files(url, lambda name: PurePosixPath(name).suffix in suffixes, watch)[0].parent


def _file(url: str, watch: Watch) -> Path:
    return local_files(url, lambda name: False, watch)[0]
