"""Read and write PEFT's adapter_config.json and parameter names, without torch.

If training starts from an adapter, its directory sets rank, alpha and layers. Options that Burnish lacks are refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError, install, refusing
from burnish.files.hub import HubPlace
from burnish.files.safetensors import ADAPTER_CONFIG, ADAPTER_PREFIX, model_digest
from burnish.files.strict_json import parse_json

ADAPTER_NAME = "default"
"""The name that PEFT gives an adapter without one."""
COPY = f".modules_to_save.{ADAPTER_NAME}"
"""What PEFT's name of a copy that is trained whole has in addition."""
NF4_BLOCK = 64
"""Weights in 4 bits that share an fp32 scale, as in QLoRA's paper."""
# PEFT's key for the model's path or its name on a hub.
_BASE_PATH = "base_model_name_or_path"
# Name of the module with the parameters of a layer's experts.
_EXPERTS = "experts"

_log = logging.getLogger(__name__)


def plain_names(model: Any) -> dict[str, tuple[str, str]]:
    """Map each parameter to its name without PEFT and "", each factor to its weight's name and "A" or "B".

    A copy that is trained whole goes to its weight's name and "W", and a layer's magnitudes to its weight's name and "m".
    """
    weights = {
        name: f"{name}.{getattr(module, 'parameter_name', 'weight')}"
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    names = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer, is_factor, rest = name.partition(".lora_")
        plain, factor = (weights[layer], rest[0]) if is_factor else (name, "")
        if COPY in name:
            plain = name.replace(COPY, "")
            factor = "W"
        names[name] = plain.replace(".base_layer", "").replace(".original_module", ""), factor
    return names


def factor_name(layer: str, letter: str) -> str:
    """Return the name of A or B of a layer (`model.layers.0.self_attn.q_proj`) in PEFT's files."""
    return f"{ADAPTER_PREFIX}{layer}.lora_{letter}.weight"


def adapted_weights(names: Iterable[str]) -> dict[str, str]:
    """Return the weights of linear layers that an adapter's tensors change, each with its layer."""
    factors = (name for name in names if ".lora_" in name)
    layers = dict.fromkeys(name.removeprefix(ADAPTER_PREFIX).split(".lora_")[0] for name in factors)
    return {f"{layer}.weight": layer for layer in layers}


def kinds_of(weights: Iterable[str]) -> list[str]:
    """Return the weights' names in `model.lora.targets`: layers (`q_proj`), then parameters of experts (`experts.down_proj`)."""
    parts = [name.split(".") for name in weights]
    kinds = {p[-2] if p[-1] == "weight" else ".".join(p[-2:]) for p in parts}
    return sorted(kinds, key=lambda kind: (are_parameters(kind), kind))


def are_parameters(kind: str) -> bool:
    """Return whether a target is a parameter of experts (PEFT's `target_parameters`)."""
    return "." in kind


def require_targets(asked: Iterable[str], kinds: Sequence[str]) -> None:
    """Raise `IncompatibleError` if a target is not among the model's `kinds`, or there are none."""
    unknown = [target for target in asked if target not in kinds]
    if unknown or not kinds:
        raise IncompatibleError(
            f"model.lora.targets names {', '.join(unknown)}, which the model does not have"
            if unknown
            else "the model has no linear layers to adapt",
            have=", ".join(kinds) or "none",
            want="names of linear layers, the output layer not among them"
            + (", and of parameters of experts" if any(map(are_parameters, kinds)) else ""),
            do="correct model.lora.targets, or leave it out for all linear layers",
        )


def import_peft() -> Any:
    """Import PEFT. Raises `UsageError` if it is not installed."""
    with refusing("LoRA needs a package that is not installed", want="peft", do=install("lora")):
        import peft
    return peft


def peft_config(
    lora: LoraConfig,
    kinds: Sequence[str],
    is_transposed: bool = False,
    *,
    keeps_ties: bool = False,
    task: str = "CAUSAL_LM",
) -> Any:
    """Return PEFT's description of an adapter, `is_transposed` for GPT-2's layers, for a `task`. Raises `UsageError` without PEFT.

    `keeps_ties`: the tables of embeddings and output are trained as one.
    """
    return import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale_alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        fan_in_fan_out=is_transposed,
        target_modules=[kind for kind in kinds if not are_parameters(kind)],
        target_parameters=[kind for kind in kinds if are_parameters(kind)] or None,
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=keeps_ties,
        task_type=task,
    )


def save_adapter_config(
    record: Mapping[str, Any], directory: Path, names: Iterable[str] = ()
) -> None:
    """Write an `adapter_record` as PEFT's adapter_config.json.

    `names` are the tensors of an adapter in a composite. Its layers are named in full there, because towers have some
    of the same kinds.
    """
    # Steps of older versions lack some.
    names_of_settings = ("rank", "alpha", "rslora", "dora", "dropout", "modules_to_save")
    lora = LoraConfig(**{name: record[name] for name in names_of_settings if name in record})
    is_transposed = record.get("fan_in_fan_out", False)
    keeps_ties = record.get("keeps_ties", False)
    task = record.get("task", "CAUSAL_LM")
    described = peft_config(
        lora, record["targets"], is_transposed, keeps_ties=keeps_ties, task=task
    )
    values = described.to_dict()
    values |= {_BASE_PATH: record["base"], "inference_mode": True}
    if base := HubPlace.of(record["base"], "model"):
        values |= {_BASE_PATH: base.repo, "revision": base.revision or None}
    values["target_modules"] = sorted(values["target_modules"])  # PEFT's is a set, which JSON lacks
    if layers := adapted_weights(names):
        kinds = set(values["target_modules"])
        full = {layer for layer in layers.values() if layer.rpartition(".")[2] in kinds}
        values["target_modules"] = sorted(full)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=2, sort_keys=True)
    (directory / ADAPTER_CONFIG).write_text(text + "\n")


def require_same_base(directory: Path, record: Mapping[str, Any]) -> None:
    """Raise `IncompatibleError` if the adapter belongs to another model; warn if that cannot be known."""
    digest = _base_digest(directory)
    if digest is None:
        _log.warning(
            "%s does not say which model it belongs to in a way that can be compared; it is taken to be %s",
            directory,
            record["base"],
        )
    elif digest != record["base_digest"]:
        raise IncompatibleError(
            f"the adapter {directory} belongs to another model",
            have=f"a model with the digest {digest[:16]}...",
            want=f"{record['base']}, with {record['base_digest'][:16]}...",
            do="set model.path to the model that it was trained on",
        )


def require_tied(directory: Path) -> None:
    """Raise `IncompatibleError` if the adapter has an output layer of its own for a model that has one table."""
    described = directory / ADAPTER_CONFIG
    if not parse_json(described.read_bytes(), str(described)).get("ensure_weight_tying"):
        raise IncompatibleError(
            f"{directory} trains a table apart that is input and output in its model",
            have="no ensure_weight_tying in its adapter_config.json",
            want="one table, as the model has it",
            do="merge the adapter into its model (PEFT's merge_and_unload), and set model.path to that",
        )


def _base_digest(directory: Path) -> str | None:
    try:
        # A checkpoint has state.json beside model/. Another program's file may have the same name.
        recorded = json.loads((directory.parent / "state.json").read_bytes())
        digest = recorded["adapter"]["base_digest"]
        if isinstance(digest, str):
            return digest
    except (OSError, ValueError, LookupError, TypeError):
        pass
    described = directory / ADAPTER_CONFIG
    base = parse_json(described.read_bytes(), str(described)).get(_BASE_PATH)
    if not base or not isinstance(base, str):
        return None
    if not (Path(base).expanduser() / "config.json").is_file():
        return None
    return model_digest(Path(base).expanduser())


_UNDERSTOOD = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
}
"""PEFT's options, and the settings of `model.lora` that they become."""

_PARAMETERS = "target_parameters"
"""PEFT's option for parameters of experts, which are targets as well."""

_MODULES = "modules_to_save"
"""PEFT's option for modules that are trained whole."""

_DORA = "use_dora"
"""PEFT's option for DoRA. Older files lack it."""

_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", _BASE_PATH, "revision", "inference_mode"),
        *("lora_dropout", "megatron_core", "qalora_group_size", "fan_in_fan_out"),
        *("ensure_weight_tying", _MODULES),
    }
)
"""PEFT's options that change nothing in an adapter that is trained here."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
"""PEFT's options that must have one of these values. All other options must be absent or off."""


def with_adapter(model: ModelConfig, content: bytes) -> ModelConfig:
    """Return `model` with the settings of the adapter at its `lora.path`, whose adapter_config.json is `content`.

    Raises `CorruptError` if it is not JSON, and `IncompatibleError` for another kind of adapter.
    """
    where = f"{model.lora.path}/{ADAPTER_CONFIG}"
    values = parse_json(content, where)
    with refusing(
        f"{where} describes an adapter that Burnish cannot train",
        IncompatibleError,
        want=f"{', '.join(_UNDERSTOOD)}, the layers as a list of names",
        do="correct model.lora.path",
    ):
        _require_plain(dict(values), where)
        settings = {ours: values[theirs] for theirs, ours in _UNDERSTOOD.items()}
        if values.get(_PARAMETERS):  # then there may be no target_modules
            settings["targets"] = settings["targets"] or []
        settings[_MODULES] = values.get(_MODULES) or []
        settings["dora"] = bool(values.get(_DORA))
        own = {
            name: getattr(model.lora, name)
            for name in ("path", "publish", "dropout", "quantize_base")
        }
        lora = LoraConfig.model_validate(own | settings)
        fused = LoraConfig.model_validate({"targets": values.get(_PARAMETERS) or []}).targets
        # PEFT writes all-linear as the full names of layers.
        weights = [f"{name}.weight" for name in lora.targets]
        weights += [f"{_EXPERTS}.{name}" for name in fused]
        lora = lora.model_copy(update={"targets": kinds_of(weights)})
        if lora.modules_to_save and lora.publish == "adapter":
            raise IncompatibleError(
                f"the adapter of {where} is not alone: modules are trained beside it",
                have=f"model.lora.publish: adapter, {_MODULES}: {', '.join(lora.modules_to_save)}",
                want="model.lora.publish: merged",
                do="set model.lora.publish=merged",
            )
    return model.model_copy(update={"lora": lora})


def _require_plain(values: dict[str, Any], where: str) -> None:
    for key, value in values.items():
        known = (
            key in {*_UNDERSTOOD, _DORA, _PARAMETERS, *_WITHOUT_EFFECT}
            or not value
            or value == "none"
        )
        if not (value in _PLAIN[key] if key in _PLAIN else known):
            raise IncompatibleError(
                f"{where} describes a kind of adapter that Burnish does not train",
                have=f"{key}: {value}",
                want=f"{key}: {_PLAIN[key][0]}" if key in _PLAIN else f"no {key}",
                do="start from another adapter, or merge this one into its model and set model.path to that",
            )
