"""The model types that docs/reference/models.md lists: trained ones, which a nightly job trains, and refused ones."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from support.models.tiny import FAMILIES, tiny_config

_OTHERS: dict[str, dict[str, Any]] = {
    "hyperclovax": {"logits_scaling": 0.125},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.1},
    "gemma3_text": {"attn_logit_softcapping": 50.0},  # which its code does not use
    "gemma4": {"text_config": {"final_logit_softcapping": 30.0, "num_kv_shared_layers": 10}},
    "cohere": {"use_qk_norm": True},
    "hunyuan_v1_moe": {
        "head_dim": 128, "num_experts": 8,
        "moe_topk": [2] * 32, "moe_intermediate_size": [3072] * 32,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 16,
        "position_embedding_type": "rope",
    },
    "qwen2_moe": {"use_sliding_window": True},
    "falcon_h1": {"lm_head_multiplier": 0.039, "mamba_rms_norm": True},
    "nemotron_h": {"time_step_min": 0.5},
    "mamba2": {"time_step_limit": [0.4, 0.9]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
} | {
    family: {}
    for family in (
        "afmoe", "apertus", "arcee", "axk1", "bamba", "biogpt", "bitnet", "cohere2", "cohere2_moe", "cwm",
        "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2",
        "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite_swa", "granitemoe",
        "granitemoe_swa", "granitemoeshared",
        "helium", "hy_v3", "jais2", "jamba", "jetmoe", "kimi_linear", "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3",
        "minimax_m2", "ministral3", "nanochat", "olmo", "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon",
        "phi3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
    )
}  # fmt: skip
TRAINED: tuple[str, ...] = tuple(sorted({*FAMILIES, *_OTHERS}))
"""The types that are trained."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zaya": ({}, "model.layers.0.self_attn.qkv_proj"),
    "mamba": ({}, "MambaMixer"),
    "phimoe": ({}, "model.layers.0.mlp"),
    # Blocks of 128 keys are chosen, so no sequence of a proof is long enough to see it.
    "minimax_m3_vl_text": ({"layer_types": ["minimax_m3_sparse"] * 60}, ""),
    "nemotron": ({"num_key_value_heads": 8}, ""),
} | {
    family: ({}, "")
    for family in (
        "axk2", "bert", "bloom", "codegen", "deepseek_v32", "deepseek_v4", "diffllama",
        "doge", "falcon", "falcon_mamba", "gemma3n", "glm4v",
        "glm_moe_dsa", "gpt_neo", "gptj", "hrm_text",
        "hy_v4", "inkling_text", "llama4", "llama4_text",
        "minimax", "mllama", "modernbert-decoder", "mpt", "openai-gpt",
        "phi", "qwen2_5_vl", "qwen3_vl", "recurrent_gemma",
        "rwkv", "stablelm", "xglm", "xlnet", "xlstm", "zamba2",
    )
}  # fmt: skip
"""What is refused, and the module that is named, if one is."""


def listed_config(kind: str) -> PretrainedConfig:
    """A configuration of a listed type: small for those that `support.models.tiny` has, else its default with what matters."""
    if kind == "gpt_bigcode":  # its module uses a deprecated decorator of torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import_module("transformers.models.gpt_bigcode.modeling_gpt_bigcode")
    fields = REFUSED[kind][0] if kind in REFUSED else _OTHERS.get(kind)
    return tiny_config(kind) if fields is None else AutoConfig.for_model(kind, **fields)
