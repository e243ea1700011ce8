"""The shape of a model that the planner is asked about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.families import LayerShape, ModelShape, family_of, text_config
from burnish.plan.model import CHUNK

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_UNTRAINED = "e_score_correction_bias"


def model_shape(config: Mapping[str, Any], engine: str) -> ModelShape:
    """Read a config.json for a run on this engine. Raises `UsageError` for a model whose memory is not known there.

    For the Megatron engine, types that `families.py` does not describe are counted: transformers builds them without memory.
    """
    family = family_of(str(text_config(config).get("model_type")))
    if engine != "megatron" or family.described or not family.on_megatron:
        return ModelShape.of(config)
    return _counted(text_config(config))


def _counted(fields: Mapping[str, Any]) -> ModelShape:
    import torch  # a plan of a described family needs no torch
    from transformers import AutoConfig

    from burnish.models.lora.adapter import adaptable_weights
    from burnish.models.meta_init import model_sizes, plain_model, router_sizes, window_of

    others = {name: value for name, value in fields.items() if name != "model_type"}
    hf_config = AutoConfig.for_model(fields["model_type"], **others)
    with torch.device("meta"):
        model = plain_model(hf_config)
    sizes = model_sizes(hf_config)
    parameters: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        if (found := _LAYER.fullmatch(name)) and not name.endswith(_UNTRAINED):
            parameters.setdefault(int(found[1]), {})[found[2]] = tuple(parameter.shape)
    layers = []
    for number, module in enumerate(model.base_model.layers):
        own = parameters[number]
        is_routed = "mlp.experts.down_proj" in own
        attention = getattr(module, "self_attn", None)
        layers.append(
            LayerShape(
                sizes.expert_intermediate if is_routed else sizes.intermediate,
                sizes.experts if is_routed else 0,
                router_sizes(hf_config)[2] if is_routed else 0,
                CHUNK if attention is None else window_of(attention, hf_config, number),
                tuple(own.items()),
            )
        )
    _, adaptable = adaptable_weights(model)
    return ModelShape(**vars(sizes), layers=tuple(layers), adaptable=tuple(adaptable))
