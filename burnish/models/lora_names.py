"""How PEFT names what is in an adapter's directory, and where a run describes one. Without torch, for those who only look at names."""

from __future__ import annotations

import re
from collections.abc import Iterable

ADAPTER_CONFIG = "adapter_config.json"
"""Describes the adapter: rank, layers, the model that it belongs to."""
BASE_PATH = "base_model_name_or_path"
"""The key in it under which the model's path, or its name on a hub, is."""
ADAPTER_WEIGHTS = "adapter_model"
"""Name of the file of its tensors, of which there is one, without suffix."""
ADAPTER_STATE = "adapter"
"""The key of a run's state that describes the adapter which the run trains."""
PREFIX = "base_model.model."
"""Begins the names of its tensors."""

_WRAPPING = re.compile(r"\.(?:base_layer|lora_([AB])\.\w+)(?=\.)")
"""What PEFT's modules put into the names of a layer's parameters."""


def plain_parameter(name: str) -> tuple[str, str]:
    """What a parameter's name was before PEFT wrapped its layer, and which factor it is: A, B, or "" for one of the model's own."""
    found = _WRAPPING.search(name)
    return _WRAPPING.sub("", name), (found[1] or "") if found else ""


def factor_name(layer: str, letter: str) -> str:
    """What the factor A or B of a layer (`model.layers.0.self_attn.q_proj`) is called."""
    return f"{PREFIX}{layer}.lora_{letter}.weight"


def layer_kinds(layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names, each once: what PEFT knows them by."""
    return sorted({name.rpartition(".")[2] for name in layers})


def adapted_weights(names: Iterable[str]) -> dict[str, str]:
    """From the names of an adapter's tensors: the model's weights that it changes, each with the layer that has it."""
    layers = dict.fromkeys(name.removeprefix(PREFIX).partition(".lora_")[0] for name in names)
    return {f"{layer}.weight": layer for layer in layers}


def is_adapter(names: Iterable[str]) -> bool:
    """Whether tensors with these names, one at least, are an adapter's."""
    found = list(names)
    return bool(found) and all(name.startswith(PREFIX) for name in found)
