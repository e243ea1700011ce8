"""Copy a run's inputs from URLs and the Hugging Face Hub to this machine; its processes share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import DataConfig, ModelConfig, RewardModelConfig, RunConfig
from burnish.distributed.collectives import agree, from_main
from burnish.distributed.device import has_bf16_products
from burnish.distributed.environment import place_of
from burnish.distributed.layout import Layout
from burnish.errors import MissingError, UsageError
from burnish.files.hub import HubPlace, is_elsewhere
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.files.urls import is_url
from burnish.method import Method
from burnish.runs.hub_revisions import FrozenOf, beginning, hub_entries, pin
from burnish.runs.preflight import data_entries
from burnish.tracking.progress import Progress

if TYPE_CHECKING:
    from burnish.files.remote_copy import Watch


def local_inputs(
    config: RunConfig,
    device: torch.device,
    layout: Layout | None = None,
    *,
    method: Method | None = None,
    only_small: bool = False,
) -> tuple[RunConfig, RunConfig]:
    """Return the configuration to record, and the one to work with. Collective.

    The first pins ids of the hub to commits, and has the precision that suits rank 0's `device`. The second has paths instead of
    ids and URLs, and rank and layers of its first adapter. Training data and frozen models are copied for the `method` that reads them; None needs
    the model alone.

    With `only_small`, frozen models and data behind URLs are not copied. A data set of the hub shrinks to its first file,
    if small. A remote model becomes a fresh one with its config.json and tokenizer. Raises `MissingError` for missing files, and
    `BurnishError` if copying fails.
    """
    layout = layout or Layout()
    frozen = _frozen_of(method)
    values = config.model_dump()
    pinned = config.model_dump()
    with agree(layout):
        if layout.is_main:
            before = beginning(pinned, config.directory, config.mirror_url, frozen)
            pin(pinned, before, frozen)
            if pinned["engine"]["precision"] == "auto":
                pinned["engine"]["precision"] = "bf16" if has_bf16_products(device) else "fp32"
    given = [section[key] for section, key, *_ in hub_entries(pinned, frozen)]
    told, values["engine"]["precision"] = from_main((given, pinned["engine"]["precision"]), layout)
    for (section, key, kind, _), value in zip(hub_entries(values, frozen), told, strict=False):
        if HubPlace.of(section[key], kind) is not None:
            section[key] = value
    pinned_config = RunConfig.model_validate(values)
    local = pinned_config
    shown = config.tracking.progress and place_of(os.environ).layout.is_main
    watch = Progress(True).phase if shown else None
    for first in (True, False):  # a machine's first process copies; then its others find the copies
        with agree(layout):
            if (layout.local_rank == 0) is first:
                _copy_all(values, watch, method, only_small=only_small)
                local = RunConfig.model_validate(values)
                local = local.model_copy(update={"model": _with_adapter(local.model)})
    return pinned_config, local


def _frozen_of(method: Method | None) -> FrozenOf:
    return (lambda _: ()) if method is None else method.frozen


def _copy_all(
    values: dict[str, Any], watch: Watch | None, method: Method | None, *, only_small: bool
) -> None:
    """Copy what `values`, a configuration, names, and put paths into its place."""
    trains = method is not None and method.trains
    if only_small and is_elsewhere(values["model"]["path"]):
        from burnish.runs.remote_copies import replace_model

        replace_model(values["model"], watch)
    _copy_models(values, watch, trains, _frozen_of(None if only_small else method))
    _copy_single_files(values, watch)
    settings = values["rollout"]["environment"]
    if settings["verifiers"] is not None:  # its client renders messages itself
        folder = values["model"]["tokenizer"] or values["model"]["path"]
        settings["kwargs"] = {"tokenizer": str(folder), **settings["kwargs"]}
    environment = EnvironmentConfig.model_validate(settings)
    if environment.target is not None:
        from burnish.runs.brought_rows import bring_rows

        bring_rows(values, environment, trains=trains)
    data = DataConfig.model_validate(values["data"])
    for name in data_entries(data, trains=trains):
        # Streamed data is read from where it lies.
        if name == "validation" or not data.streaming:
            _copy_data(values["data"], name, watch, only_small=only_small)


def _copy_models(
    values: dict[str, Any], watch: Watch | None, trains: bool, frozen: FrozenOf
) -> None:
    has_weights = trains or values["rollout"]["engine"] != "openai"
    for judge in values["reward"]["models"]:
        if is_elsewhere(judge["path"]):  # the directory of its copy has another name
            judge["name"] = RewardModelConfig(**judge).part_name
    for section, key, kind, _ in hub_entries(values, frozen):
        if kind == "model" and is_elsewhere(section.get(key)):
            from burnish.runs.remote_copies import local_directory

            section[key] = str(local_directory(section[key], watch, weights=has_weights))


def _copy_single_files(values: dict[str, Any], watch: Watch | None) -> None:
    """Copy a chat template, the config.json of a fresh model, and files of reward functions."""
    model = values["model"]
    for setting in ("chat_template", "fresh"):
        if isinstance(model[setting], str) and is_url(model[setting]):
            from burnish.runs.remote_copies import local_file

            model[setting] = str(local_file(model[setting], watch))
    for reward in values["reward"]["functions"]:
        file, colon, name = reward["function"].rpartition(":")
        if file.endswith(".py") and is_url(file):
            from burnish.runs.remote_copies import local_file

            reward["function"] = f"{local_file(file, watch)}{colon}{name}"


def _copy_data(data: dict[str, Any], name: str, watch: Watch | None, *, only_small: bool) -> None:
    """Copy the entries of `data.train` or `data.validation`; each becomes the paths of its files."""
    entries = data[name]
    data[name] = []
    for entry in entries:
        files = [entry]
        if is_elsewhere(entry, "dataset"):
            from burnish.runs.remote_copies import local_data

            files = local_data(entry, f"data.{name}", watch, only_small=only_small)
        if name == "train" and data["weights"] and len(files) > 1:
            raise UsageError(
                f"data.weights cannot weigh {entry}, which is {len(files)} files",
                want="remote entries of one file each",
                do="copy it to a directory of this machine, and name that in data.train",
            )
        data[name] += files


def _with_adapter(model: ModelConfig) -> ModelConfig:
    if model.lora.path is None:
        return model
    described = Path(model.lora.path).expanduser() / ADAPTER_CONFIG
    if not described.is_file():
        raise MissingError(
            f"there is no adapter to continue from in {described.parent}",
            have=f"no {ADAPTER_CONFIG}" if described.parent.is_dir() else "no such directory",
            want=f"a directory with {ADAPTER_CONFIG}, for as long as the run goes on",
            do="set model.lora.path to such a directory",
        )
    from burnish.models.lora.adapter_config import with_adapter

    return with_adapter(model, described.read_bytes())
