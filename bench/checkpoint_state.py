"""The state that checkpoint benchmarks save: a model of a given size, with the same shapes for all sides.

This module does not import Burnish, because the peers' processes import it too.
"""

from __future__ import annotations

from typing import Any

BYTES_PER_WEIGHT = 12
"""fp32 weight and two fp32 slots of AdamW; Burnish stores the weight as 2 + 2."""


def model_settings(gigabytes: float) -> dict[str, Any]:
    """Return settings of a Qwen3 model whose weights and optimizer state have about so many 10^9 bytes."""
    weights = gigabytes * 1e9 / BYTES_PER_WEIGHT
    hidden = 256 if gigabytes < 0.3 else 768 if gigabytes < 0.8 else 1024
    vocabulary = 16 * hidden
    layers = round((weights - vocabulary * hidden) / (12 * hidden**2))
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": max(1, layers),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
