"""Where an adapter's first values come from: fresh ones, or another adapter of the same model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from burnish.boxes.shards import ShardSource, TensorSpec
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError, few
from burnish.files.safetensors import model_digest
from burnish.files.strict_json import parse_json
from burnish.models.loading import SafetensorsSource
from burnish.models.lora.adapter import Adapter, FreshAdapter
from burnish.models.lora.adapter_names import ADAPTER_CONFIG, ADAPTER_STATE, BASE_PATH
from burnish.models.lora.record import AdapterRecord
from burnish.models.meta_init import build_on_meta

_STATE = "state.json"
# Of a run's step, beside `model/`, which is the adapter.

_log = logging.getLogger(__name__)


def first_adapter(
    model: ModelConfig, hf_config: PretrainedConfig, adapter: AdapterRecord, seed: int
) -> ShardSource:
    """The values that `model.lora` starts from, compared with the adapter that it makes before any is read.

    Raises `IncompatibleError` for an adapter of another model, or one that has tensors elsewhere, and as
    `SafetensorsSource.check` does.
    """
    if model.lora.path is None:
        return FreshAdapter(seed)
    directory = Path(model.lora.path).expanduser()
    _require_same_base(directory, adapter)
    source = SafetensorsSource(directory)
    weights = Adapter(build_on_meta(hf_config), model.lora).weights
    extra = source.check(TensorSpec(each.name, each.shape, torch.float32) for each in weights)
    if extra:
        raise IncompatibleError(
            f"{directory} adapts more than what is trained here",
            have=few(extra),
            want=f"A and B of {', '.join(adapter.targets)}",
            do="start from an adapter of linear layers, the output layer not among them",
        )
    return source


def _require_same_base(directory: Path, adapter: AdapterRecord) -> None:
    """Raise where it can be known that an adapter belongs to another model, and say where it cannot."""
    digest = _base_digest(directory)
    if digest is None:
        _log.warning(
            "%s does not say which model it belongs to in a way that can be compared; it is taken to be %s",
            directory,
            adapter.base,
        )
    elif digest != adapter.base_digest:
        raise IncompatibleError(
            f"the adapter {directory} belongs to another model",
            have=f"a model with the digest {digest[:16]}...",
            want=f"{adapter.base}, with {adapter.base_digest[:16]}...",
            do="set model.path to the model that it was trained on",
        )


def _recorded_digest(state: Path) -> str | None:
    """Return the digest that a run wrote into `state`; None for a file of any other program."""
    try:
        found: Any = json.loads(state.read_bytes())
    except (OSError, ValueError):
        return None
    recorded = found.get(ADAPTER_STATE) if isinstance(found, dict) else None
    digest = recorded.get("base_digest") if isinstance(recorded, dict) else None
    return digest if isinstance(digest, str) else None


def _base_digest(directory: Path) -> str | None:
    """Of the model that an adapter was trained on: as its run wrote it down, or of where it says that model is."""
    digest = _recorded_digest(directory.parent / _STATE)
    if digest is not None:
        return digest
    described = directory / ADAPTER_CONFIG
    base = parse_json(described.read_bytes(), str(described)).get(BASE_PATH)
    if not base or not (Path(base).expanduser() / "config.json").is_file():
        return None
    return model_digest(Path(base).expanduser())
