"""Copy a run's inputs from URLs to this machine before anything else begins.

The run records the configuration with the URLs and works with the paths of the copies. All processes of a machine get the
same copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from burnish.config.schema import CriticConfig, ModelConfig, RewardConfig, RunConfig
from burnish.data.columns import is_data
from burnish.distributed.environment import place_of
from burnish.errors import MissingError
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.files.urls import is_url
from burnish.functions import load_function
from burnish.tracking.progress import Progress

Watch = Callable[[str, float], AbstractContextManager[Any]]
"""Shows a copy's name and megabytes while the block runs."""

_COPY = "burnish.files.cache:local_files"  # only runs with URLs load it
_MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".model", ".txt", ".jinja", ".py"})


def with_local_inputs(config: RunConfig, *, trains: bool = True) -> RunConfig:
    """Return the configuration with paths instead of URLs, and with rank and layers of the adapter that it starts from.

    Training data and a critic are copied only if it `trains`. Raises `MissingError` for missing files, and `BurnishError` if
    copying fails.
    """
    progress = Progress(config.tracking.progress and place_of(os.environ).layout.is_main)
    watch: Watch = progress.phase
    data = {"validation": _data(config.data.validation, watch)}
    if trains:
        data["train"] = _data(config.data.train, watch)
    return config.model_copy(
        update={
            "model": _model(config.model, watch),
            "critic": _critic(config.critic, watch) if trains else config.critic,
            "data": config.data.model_copy(update=data),
            "reward": _reward(config.reward, watch),
        }
    )


def local_directory(url: str, watch: Watch | None = None) -> Path:
    """Copy a Hugging Face directory, its own code included. Raises `MissingError` if it has no files."""
    return _copies(url, _is_of_model, watch)[0].parent


def _model(model: ModelConfig, watch: Watch) -> ModelConfig:
    local: dict[str, Any] = {}
    for field, copy in (
        ("path", local_directory),
        ("tokenizer", local_directory),
        ("chat_template", _file),
        ("fresh", _file),
    ):
        value = getattr(model, field)
        if isinstance(value, str) and is_url(value):
            local[field] = str(copy(value, watch))
    lora = model.lora
    if lora.path is not None and is_url(lora.path):
        local["lora"] = lora.model_copy(update={"path": str(local_directory(lora.path, watch))})
    model = model.model_copy(update=local)
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


def _critic(critic: CriticConfig, watch: Watch) -> CriticConfig:
    if critic.path is None or not is_url(critic.path):
        return critic
    return critic.model_copy(update={"path": str(local_directory(critic.path, watch))})


def _data(entries: Sequence[str], watch: Watch) -> list[str]:
    paths: list[str] = []
    for entry in entries:
        if not is_url(entry):
            paths.append(entry)
        else:
            paths += map(str, _copies(entry, is_data, watch))
    return paths


def _reward(reward: RewardConfig, watch: Watch) -> RewardConfig:
    functions = []
    for each in reward.functions:
        file, colon, name = each.function.rpartition(":")
        if file.endswith(".py") and is_url(file):
            local = f"{_file(file, watch)}{colon}{name}"
            each = each.model_copy(update={"function": local})
        functions.append(each)
    models = []
    for judge in reward.models:
        if is_url(judge.path):  # a copy's directory is not called after what it is a copy of alone
            local = str(local_directory(judge.path, watch))
            judge = judge.model_copy(update={"path": local, "name": judge.part_name})
        models.append(judge)
    return reward.model_copy(update={"functions": functions, "models": models})


def _file(url: str, watch: Watch) -> Path:
    return _copies(url, lambda name: False, watch)[0]


def _copies(url: str, wanted: Callable[[str], bool], watch: Watch | None) -> list[Path]:
    """Copy the file at a URL, or the wanted files of a directory there."""
    found: list[Path] = load_function(_COPY, url)(url, wanted, watch)
    return found


def _is_of_model(name: str) -> bool:
    return PurePosixPath(name).suffix in _MODEL_SUFFIXES
