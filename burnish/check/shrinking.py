"""A small model of the same kind: every width and depth made small.

Kept is everything that makes layouts differ: family, tied embeddings, biases, query heads per key head, windows, experts by
layer. The vocabulary is the tokenizer's.
"""

from __future__ import annotations

import copy
import math

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.families import layers_with_experts

LAYERS, HEAD_DIM, KEY_HEADS = 2, 16, 2
_AT_MOST = {
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_window_layers": 1,
}
_EXPERTS = ("num_experts", "num_local_experts")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def shrunk(hf_config: PretrainedConfig, engine: EngineConfig) -> PretrainedConfig:
    """Return a copy with 16-wide heads, as small as the ranks of a layout can share.

    It has at least two key heads, two layers (or one per stage) and four experts, each a multiple of the ranks that divide it.
    """
    tensor = math.lcm(engine.tensor_parallel, engine.expert_tensor_parallel or 1)
    sequence, stages = engine.sequence_parallel, engine.pipeline_parallel * engine.virtual_stages
    config = copy.deepcopy(hf_config)
    heads = config.num_attention_heads
    own = getattr(config, "num_key_value_heads", None) or heads
    sharing = heads // own
    key_heads = min(own, max(KEY_HEADS, tensor * sequence // math.gcd(sequence, sharing)))
    config.num_attention_heads = key_heads * sharing
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = key_heads
    config.hidden_size = config.num_attention_heads * HEAD_DIM
    if getattr(config, "head_dim", None):
        config.head_dim = HEAD_DIM
    mixed = hasattr(config, "mlp_only_layers") and (
        0 < len(layers_with_experts(vars(config))) < config.num_hidden_layers
    )
    config.num_hidden_layers = min(config.num_hidden_layers, max(LAYERS, stages))
    if mixed:
        config.mlp_only_layers, config.decoder_sparse_step = [0], 1
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))  # so that each kind has a layer
        config.layer_types = [kinds[i % len(kinds)] for i in range(config.num_hidden_layers)]
    for name, most in _AT_MOST.items():
        if isinstance(value := getattr(config, name, None), int):
            parts = engine.expert_parallel if name in _EXPERTS else tensor if name in _WIDTHS else 1
            setattr(config, name, min(value, -(-most // parts) * parts))
    return config
