"""An adapter that training goes on from: a directory of PEFT's, of another run or of another program.

What its `adapter_config.json` says takes the place of rank, alpha and layers in the configuration.
Without torch, so that planning can read it. Left out: everything that PEFT can do and this library
does not, which is refused by its name there.
"""

from __future__ import annotations

from typing import Any

from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError
from burnish.files.strict_json import parse_json
from burnish.models.lora.adapter_names import (
    ADAPTER_CONFIG,
    BASE_PATH,
    layer_kinds,
    parameter_kinds,
)

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
    """The settings with rank, alpha and layers of the adapter at `model.lora.path`; `content` is its adapter_config.json.

    Raises `CorruptError` for what is not JSON, and `IncompatibleError` for an adapter of another kind.
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
