"""Keep a composite what it was: a checkpoint whose model also reads images, video or audio.

Burnish trains its language model alone, as transformers' causal language model of the same type. A step of the run is
the composite again, with its own names, configuration and processor, and with every other tensor as it was. So are layers for
multi-token prediction, which transformers' models lack (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.utils import (
    AUDIO_TOKENIZER_NAME,
    CHAT_TEMPLATE_FILE,
    FEATURE_EXTRACTOR_NAME,
    IMAGE_PROCESSOR_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)

from burnish.boxes.tensor_reader import DirectoryReader, TensorInfo
from burnish.errors import IncompatibleError, few
from burnish.files.strict_json import parse_object
from burnish.models.language_model import MTP, Composite, language_config
from burnish.models.meta_init import build_on_meta
from burnish.models.names import tensor_specs, tied_names

_CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_TIE = "tie_word_embeddings"
_DTYPES = ("dtype", "torch_dtype")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PROCESSOR_FILES = (
    PROCESSOR_NAME,
    IMAGE_PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    FEATURE_EXTRACTOR_NAME,
    AUDIO_TOKENIZER_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
)
"""The files that make images, video and audio tensors. The tokenizer's own files are written anew."""


def composite_at(directory: Path, hf_config: PretrainedConfig) -> Composite | None:
    """Return what the directory of the language model `hf_config` holds around it; None if it is no composite's.

    Raises `IncompatibleError` for two language models, or for quantized tensors that could not be kept.
    """
    whole = AutoConfig.from_pretrained(directory, local_files_only=True)
    if language_config(whole) is whole:
        return None
    tensors = DirectoryReader(directory).tensors
    prefix, names = language_names(tensors, build_on_meta(hf_config))
    rest = _beside(tensors, names)
    _require_plain(directory, rest)
    strays = [name for name in rest if prefix and name.startswith(prefix)]
    return Composite(directory, names, rest, frozenset(strays))


def with_mtp_layers(directory: Path, hf_config: PretrainedConfig) -> Composite | None:
    """Return the layers for multi-token prediction in the directory of the language model `hf_config`; None if there are none.

    Raises `IncompatibleError` for quantized ones.
    """
    rest = mtp_layers(DirectoryReader(directory).tensors, hf_config)
    _require_plain(directory, rest)
    return Composite(directory, {}, rest) if rest else None


def mtp_layers(
    tensors: Mapping[str, TensorInfo], hf_config: PretrainedConfig
) -> dict[str, TensorInfo]:
    """Return the tensors of layers for multi-token prediction that the model of `hf_config` lacks.

    Their names begin with "mtp" (Qwen3-Next), or they lie in a layer that joins embeddings and hidden states (DeepSeek-V3, GLM-4.5).
    """
    joins = ".eh_proj.weight"
    layers = tuple(n.removesuffix(joins) + "." for n in tensors if n.endswith(joins))
    found = {n: t for n, t in tensors.items() if n.startswith(layers) or MTP.search(n)}
    own = {spec.name for spec in tensor_specs(build_on_meta(hf_config))} if found else set()
    return {name: each for name, each in found.items() if name not in own}


def _require_plain(directory: Path, rest: Mapping[str, TensorInfo]) -> None:
    quantized = [name for name, each in rest.items() if _is_quantized(each.dtype)]
    if quantized:
        raise IncompatibleError(
            f"{directory} has quantized tensors beside its language model, which could not be read again",
            have=few(quantized),
            want="weights of 16 bits or more, because a saved model has no quantization_config",
            do="dequantize the model first",
        )


def language_names(stored: Collection[str], model: PreTrainedModel) -> tuple[str, dict[str, str]]:
    """Return the prefix of a composite's language model, and its name of each of the model's tensors, tied ones included.

    The language model lies below the one prefix under which all its tensors are. Names that are not stored are left out.
    Raises `IncompatibleError` for two such prefixes.
    """
    own = f"{model.base_model_prefix}."
    names = [*(spec.name for spec in tensor_specs(model)), *tied_names(model)]
    inner = [name.removeprefix(own) for name in names if name.startswith(own)]
    prefixes: dict[str, int] = {}
    for tail in inner[:1]:
        for name in stored:
            prefix = name.removesuffix(tail)
            if prefix != name and (not prefix or prefix.endswith(".")):
                prefixes[prefix] = sum(f"{prefix}{each}" in stored for each in inner)
    most = max(prefixes.values(), default=0)
    best = [prefix for prefix, count in prefixes.items() if count == most]
    if len(best) > 1:
        raise IncompatibleError(
            "the checkpoint holds several models that could be the language model",
            have=few([f"{each}*" for each in best]),
            want=f"one prefix for all tensors of the {model.config.model_type}",
            do="save the one to be trained alone, and set model.path to that",
        )
    stored_names = {}
    for name in names:
        tail = name.removeprefix(own)
        places = [f"{best[0]}{tail}"] if best and tail != name else _outwards(best, name)
        if there := next((each for each in places if each in stored), None):
            stored_names[name] = there
    return best[0] if best else "", stored_names


def _outwards(prefixes: list[str], name: str) -> list[str]:
    """Return the places of a tensor beside the backbone: next to it, then further out."""
    parts = prefixes[0].split(".")[:-1] if prefixes else []
    return [".".join([*parts[:count], name]) for count in range(len(parts), -1, -1)]


def kept_beside(config: bytes, tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Return the names of the tensors beside the language model in the checkpoint of this config.json."""
    whole = _known(config)
    if whole is None:
        return frozenset()
    language = language_config(whole)
    if language is whole:
        return frozenset(mtp_layers(tensors, whole))
    return frozenset(_beside(tensors, language_names(tensors, build_on_meta(language))[1]))


def language_within(config: bytes) -> PretrainedConfig | None:
    """Return the configuration of the language model in a composite's config.json; None for another model's."""
    whole = _known(config)
    language = None if whole is None else language_config(whole)
    return None if language is whole else language


def _known(config: bytes) -> PretrainedConfig | None:
    """Read a config.json; None if transformers has no class for it."""
    values = parse_object(config, _CONFIG)
    kind = values.get("model_type")
    if "auto_map" in values or not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    known: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(values)
    return known


def _beside(tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> dict[str, TensorInfo]:
    language = set(names.values())
    return {name: each for name, each in tensors.items() if name not in language}


def _is_quantized(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


def language_modules(composite: Composite, hf_config: PretrainedConfig) -> tuple[str, str]:
    """Return the backbone's module name in the causal language model, and in the composite's own class.

    Raises `IncompatibleError` if transformers' class has no such module.
    """
    model = build_on_meta(hf_config)
    whole = AutoConfig.from_pretrained(composite.directory, local_files_only=True)
    with torch.device("meta"):
        return model.base_model_prefix, module_like(
            class_of(whole)._from_config(whole), model.base_model
        )


def class_of(whole: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of a composite."""
    kinds = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    composite_class: type[PreTrainedModel] = next(
        each[type(whole)] for each in kinds if type(whole) in each
    )
    return composite_class


def module_like(model: PreTrainedModel, backbone: nn.Module) -> str:
    """Return the name of a model's one module of the class of `backbone`. Raises `IncompatibleError`."""
    kind = type(backbone)
    names = [name for name, module in model.named_modules() if type(module) is kind]
    if len(names) != 1:
        raise IncompatibleError(
            f"{type(model).__name__} does not have its language model in one place",
            have=few(names) or f"no {kind.__name__}",
            want=f"one {kind.__name__}",
            do="save its language model alone, and set model.path to that",
        )
    return names[0]


def _aligned(current: object, written: Any) -> Any:
    """Return a saved language model's value of a key; where the composite has several tokens, the others stay."""
    if not isinstance(current, list) or isinstance(written, list):
        return written
    return [written, *(each for each in current if each != written)]


def write_composite_assets(composite: Composite, directory: Path, dtype: torch.dtype) -> None:
    """Turn the files of a saved language model into the composite's: its config.json and its processor's files."""
    written = parse_object((directory / _CONFIG).read_bytes(), _CONFIG)
    values = parse_object((composite.directory / _CONFIG).read_bytes(), _CONFIG)
    values.pop(_QUANTIZATION, None)
    whole = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    text = whole.get_text_config()
    keys = [key for key in whole.sub_configs if getattr(whole, key, None) is text]
    parts: list[dict[str, Any]] = [values, *(values.setdefault(key, {}) for key in keys)]
    for part in parts:
        for key in (*_SPECIAL_TOKENS, _TIE):
            if key in written and (key in part or part is not values):
                part[key] = _aligned(part.get(key), written[key])
        if dtype_keys := [key for key in _DTYPES if key in part]:
            part |= dict.fromkeys(dtype_keys, str(dtype).partition(".")[2])
    if getattr(whole, _TIE, written.get(_TIE)) != written.get(_TIE):
        values[_TIE] = written.get(_TIE)
    if not any(key in values for key in _DTYPES):
        values["dtype"] = str(dtype).partition(".")[2]
    (directory / _CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name in dict.fromkeys(_PROCESSOR_FILES):
        if (composite.directory / name).is_file():
            (directory / name).write_bytes((composite.directory / name).read_bytes())
    template = composite.directory / CHAT_TEMPLATE_FILE
    if template.is_file() and not (directory / CHAT_TEMPLATE_FILE).exists():
        (directory / CHAT_TEMPLATE_FILE).write_bytes(template.read_bytes())
