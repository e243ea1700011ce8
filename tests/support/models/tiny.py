"""Tiny models of every tested family, for tests of any package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from burnish.models.value_head import value_class
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.runs.training_files import FRESH

VOCAB = 97

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 0.5,
    },
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 7,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "granite_swa": {"sliding_window": 7},
    "mimo_v2_flash": {
        "head_dim": 8,
        "v_head_dim": 4,
        "sliding_window": 7,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
}
"""Families with sinks or soft caps, of which `burnish.families` does not have all."""
_DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DELTA_NET_OF_EXPERTS: dict[str, Any] = {
    **_DELTA_NET,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
WITH_STATE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET_OF_EXPERTS,
    "qwen3_next": _DELTA_NET_OF_EXPERTS,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}
"""Families with layers whose state goes on from token to token."""
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "time_step_limit": (0.4, 0.9),
}
BOUNDED_STATES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 0.5,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_limit": (0.4, 0.9),
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 64,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "lm_head_multiplier": 0.3,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    },
}
"""Families with Mamba layers, whose time steps are bounded where it matters, in chunks that are shorter than some prompts."""
_BY_TYPE: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_GROUPED: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 32,
    },
}
_LATENT_OF_EXPERTS: dict[str, Any] = {
    name: value for name, value in (_GROUPED | _LATENT).items() if name != "head_dim"
}
ON_MEGATRON: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT_OF_EXPERTS,
    "deepseek_v2": {
        **_LATENT_OF_EXPERTS,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "glm4_moe_lite": {**_LATENT_OF_EXPERTS, "rope_interleave": False},
    "minicpm3": {**_LATENT, "scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 16},
    "youtu": {**_LATENT, "attention_bias": True, "pad_token_id": None, "tie_word_embeddings": True},
    "dots1": {**_GROUPED, "layer_types": ["full_attention"] * 3, "norm_topk_prob": False},
    "exaone_moe": {
        **_GROUPED,
        **_BY_TYPE,
        "num_experts": 4,
        "num_shared_experts": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm4_moe": {**_GROUPED, "attention_bias": True, "use_qk_norm": True},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "solar_open": {**_GROUPED, "first_k_dense_replace": 0},
    "olmo3": _BY_TYPE,
    "flex_olmo": {**_EXPERTS, "norm_topk_prob": True},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "olmoe": _EXPERTS,
    "qwen2_moe": {
        **_EXPERTS,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {
        "head_dim": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "num_hidden_layers": 3,
    },
    "helium": {"head_dim": 8},
    "hyperclovax": {
        "use_post_norm": True,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "smollm3": {**_BY_TYPE, "no_rope_layers": [0, 1], "use_sliding_window": True},
    "ministral": {**_BY_TYPE, "head_dim": 16},
    "phi3": {
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True, "attention_out_bias": False},
    "cwm": {**_BY_TYPE, "head_dim": 16},
    "exaone4": _BY_TYPE,
    "hunyuan_v1_dense": {"head_dim": 16},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
}
"""Families that the Megatron engine computes and `burnish.families` does not describe to the planner."""
MIXTURES = ("mixtral", "qwen3_moe")
"""Those with experts."""


def tiny_config(family: str = "qwen3", **changes: Any) -> PretrainedConfig:
    """A configuration of a few thousand parameters; `changes` override its fields."""
    known = FAMILIES | OTHERS | BOUNDED_STATES | WITH_STATE | ON_MEGATRON
    return AutoConfig.for_model(family, **{**_BASE, **known[family], **changes})


def tiny_model(
    family: str = "qwen3", seed: int = 0, attention: str | None = None, **changes: Any
) -> PreTrainedModel:
    """A plain transformers model with random weights in fp32, large enough to make every part matter."""
    attention = attention or ("eager" if family in OTHERS or family in BOUNDED_STATES else "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, **changes), dtype=torch.float32, attn_implementation=attention
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def save_tiny(
    directory: Path, family: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """A tiny model as a Hugging Face directory."""
    tiny_model(family, **changes).to(dtype).save_pretrained(directory)
    return directory


def save_classifier(
    directory: Path, family: str = "qwen3", kind: str = "Sequence", labels: int = 1
) -> Path:
    """Write a reward model and its tokenizer."""
    config = tiny_config(family, vocab_size=len(char_tokenizer()), pad_token_id=None)
    config.num_labels = labels
    config.architectures = [f"XFor{kind}Classification"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(family))
        model = value_class(config)._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    save_char_tokenizer(directory)
    return directory


def save_base(directory: Path, seed: int, **changes: Any) -> None:
    """Save a model like those that runs make anew, with its tokenizer."""
    settings = FRESH | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    save_char_tokenizer(directory)
