"""PEFT's adapter_config.json and the names of an adapter's tensors, without torch.

A directory of PEFT's that training starts from gives rank, alpha and layers in place of the configuration. Whatever PEFT can
do and Burnish does not is refused by its name there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError
from burnish.files.strict_json import parse_json

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

_EXPERTS = "experts"
# The module that has the parameters of a layer's experts.


def adapted_parameters(modules: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return PEFT's layers among a model's modules, each with the parameter that it changes, named without PEFT."""
    return {
        name: f"{_plain(name)}.{getattr(module, 'parameter_name', 'weight')}"
        for name, module in modules
        if hasattr(module, "lora_A")
    }


def plain_parameter(name: str, adapted: Mapping[str, str]) -> tuple[str, str]:
    """Return a parameter's name without PEFT and "", or the parameter that a factor changes and A or B.

    `adapted` is the model's `adapted_parameters`.
    """
    layer, found, rest = name.partition(".lora_")
    return (adapted[layer], rest[0]) if found else (_plain(name), "")


def _plain(name: str) -> str:
    return name.replace(".base_layer", "")


def factor_name(layer: str, letter: str) -> str:
    """What the factor A or B of a layer (`model.layers.0.self_attn.q_proj`) is called."""
    return f"{PREFIX}{layer}.lora_{letter}.weight"


def layer_kinds(layers: Iterable[str]) -> list[str]:
    """The last parts of the layers' names, each once: what PEFT's `target_modules` knows them by."""
    return sorted({name.rpartition(".")[2] for name in layers})


def parameter_kinds(parameters: Iterable[str]) -> list[str]:
    """The last two parts of the names of experts' parameters, each once, as `experts.down_proj`: for PEFT's `target_parameters`."""
    return sorted({".".join([_EXPERTS, *name.split(".")][-2:]) for name in parameters})


def are_parameters(kind: str) -> bool:
    """Whether something that is adapted is known as one of `parameter_kinds` and not of `layer_kinds`."""
    return "." in kind


def require_targets(asked: Iterable[str], kinds: Sequence[str]) -> None:
    """Raise `IncompatibleError` if a model with these `kinds` of layers and parameters lacks some of the targets, or has none."""
    unknown = [target for target in asked if target not in kinds]
    if unknown or not kinds:
        raise IncompatibleError(
            f"the model has no linear layers {', '.join(unknown)}",
            have=", ".join(kinds) or "none",
            want="names of linear layers, the output layer not among them"
            + (", and of parameters of experts" if any(map(are_parameters, kinds)) else ""),
            do="correct model.lora.targets, or leave it out for all linear layers",
        )


def adapted_weights(names: Iterable[str]) -> dict[str, str]:
    """Return, from an adapter's tensor names, the model's weights that it changes, each with its layer."""
    layers = dict.fromkeys(name.removeprefix(PREFIX).partition(".lora_")[0] for name in names)
    return {f"{layer}.weight": layer for layer in layers}


def is_adapter(names: Iterable[str]) -> bool:
    """Whether tensors with these names, one at least, are an adapter's."""
    found = list(names)
    return bool(found) and all(name.startswith(PREFIX) for name in found)


_UNDERSTOOD = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
}
"""What of PEFT's configuration is which setting of `model.lora`."""

_PARAMETERS = "target_parameters"
"""What else of it is among the targets: the experts' parameters."""

_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", BASE_PATH, "revision", "inference_mode"),
        *("lora_dropout", "megatron_core", "qalora_group_size"),
    }
)
"""What of it changes nothing of an adapter that is trained here."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
"""What of it has to have one of these values; all else has to be left out, or off."""


def with_adapter(model: ModelConfig, content: bytes) -> ModelConfig:
    """Return the settings with rank, alpha and layers of the adapter at `model.lora.path`; `content` is its adapter_config.json.

    Raises `CorruptError` if it is not JSON, and `IncompatibleError` for another kind of adapter.
    """
    where = f"{model.lora.path}/{ADAPTER_CONFIG}"
    values = parse_json(content, where)
    try:
        _require_plain(dict(values), where)
        found = {ours: values[theirs] for theirs, ours in _UNDERSTOOD.items()}
        if values.get(_PARAMETERS):  # beside which there may be no layers
            found["targets"] = found["targets"] or []
        kept = {"path": model.lora.path, "publish": model.lora.publish}
        lora = LoraConfig.model_validate(kept | found)
        fused = LoraConfig.model_validate({"targets": values.get(_PARAMETERS) or []}).targets
        # PEFT writes the whole names of layers that were asked for as all-linear.
        targets = [*layer_kinds(lora.targets), *parameter_kinds(fused)]
        lora = lora.model_copy(update={"targets": targets})
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleError(
            f"{where} describes no adapter that can be trained here",
            have=" ".join(str(error).split())[:300],
            want=f"{', '.join(_UNDERSTOOD)}, the layers as a list of names",
            do="correct model.lora.path",
        ) from error
    return model.model_copy(update={"lora": lora})


def _require_plain(values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        known = key in {*_UNDERSTOOD, _PARAMETERS, *_WITHOUT_EFFECT} or not value or value == "none"
        if not (value in _PLAIN[key] if key in _PLAIN else known):
            raise IncompatibleError(
                f"{where} describes an adapter that is not trained here",
                have=f"{key}: {value}",
                want=f"{key}: {_PLAIN[key][0]}" if key in _PLAIN else f"no {key}",
                do="start from another adapter, or merge this one into its model and set model.path to that",
            )
