"""The language model within a composite, whose model also reads images, video or audio."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from burnish.boxes.tensor_reader import TensorInfo
from burnish.models.heads import has_value_head
from burnish.models.meta_init import other_inputs

MTP = re.compile(r"(^|\.)mtp[._]|\.eh_proj\.weight$")
"""Found in names of tensors that only layers for multi-token prediction have."""
_WITH_IMAGES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a composite's language model if transformers has it as a causal language model, else `config`."""
    text = config.get_text_config()
    if text is config or has_value_head(config):
        return config
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_alone = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is not None
    is_composite = config.model_type in _WITH_IMAGES and other_inputs(config) and is_alone
    if getattr(kind, "config_class", None) is not type(text) and not (
        is_composite and not (config.is_encoder_decoder or text.is_encoder_decoder)
    ):
        return config
    text.name_or_path = config.name_or_path
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text


@dataclass(frozen=True, slots=True)
class Composite:
    """The checkpoint around a language model, whose model also reads images, video or audio, or that has layers for multi-token prediction."""

    directory: Path
    names: Mapping[str, str]
    """The checkpoint's name of each tensor of the language model, by the language model's own; empty if it is the checkpoint's own model."""
    rest: Mapping[str, TensorInfo]
    """All other tensors, which are kept as they are."""
    strays: frozenset[str] = frozenset()
    """Those of them that lie in the language model and that it has no use for."""
