"""A scalar head on a language model's backbone: critics and reward models.

A critic is transformers' token classification model with one label. A sequence classification model
has the same head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from burnish.errors import IncompatibleError
from burnish.models.heads import OF_SEQUENCES, has_value_head


def value_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the same backbone with a scalar head. Raises `IncompatibleError` if it has another head, or can have none."""
    if has_value_head(config) and config.num_labels != 1:
        raise IncompatibleError(
            f"{config.name_or_path or config.model_type} has several outputs for a token, not one value",
            have=f"{config.num_labels} labels",
            want="a token or sequence classification model with one label, or a language model",
            do="set critic.path to one",
        )
    critic_config = copy.deepcopy(config)
    critic_config.num_labels = 1
    critic_config.architectures = [value_class(config).__name__]
    return critic_config


def classifier_config(config: PretrainedConfig, pad_token_id: int | None) -> PretrainedConfig:
    """Return the same backbone with the head of transformers' sequence classification, of one label: a reward model.

    Raises `IncompatibleError` if transformers has no such class for the family. `pad_token_id`: with it, transformers finds the last token.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise IncompatibleError(
            f"models of type {config.model_type} cannot be reward models",
            have="no class for sequence classification in transformers",
            want="a family that has one",
            do="set model.path to a model of another family",
        )
    classifier = copy.deepcopy(config)
    classifier.num_labels = 1
    classifier.pad_token_id = pad_token_id
    classifier.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    return classifier


def value_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the family's token classification class, built from transformers' generic class if it has none.

    A configuration may name a sequence classification class instead. Raises `IncompatibleError` if the family has no language model.
    """
    mappings = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING]
    if any(name.endswith(OF_SEQUENCES) for name in config.architectures or ()):
        mappings.insert(0, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise IncompatibleError(
            f"models of type {config.model_type} cannot be critics",
            have="a model that transformers does not know as a language model",
            want="a language model of transformers",
            do="set critic.path to a model of another family, or algorithm.advantage=grpo",
        )
    language = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(base for base in language.__bases__ if issubclass(base, PreTrainedModel))
    name = language.__name__.replace("ForCausalLM", "ForTokenClassification")
    return type(name, (GenericForTokenClassification, family), {"__module__": __name__})


def head_has_bias(config: PretrainedConfig) -> bool:
    """Return whether a value head has a bias, as transformers' token classifiers do."""
    return issubclass(value_class(config), GenericForTokenClassification)


def value_head(model: PreTrainedModel) -> nn.Linear:
    """Return a model's scalar head. PEFT wraps one that is trained beside an adapter."""
    return next(child for _, child in _heads(model))


def value_head_name(model: PreTrainedModel) -> str:
    """Return the name of a model's scalar head."""
    return next(name for name, _ in _heads(model))


def _heads(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, child in model.named_children():
        if isinstance(getattr(child, "original_module", child), nn.Linear):
            yield name, child


def state_values(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return the values [N], fp32, of states [N, H] in any dtype."""
    bias = None if head.bias is None else head.bias.float()
    return nn.functional.linear(hidden.float(), head.weight.float(), bias)[:, 0]
