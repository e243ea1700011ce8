"""Whether a model can be cut as the settings say, before any of it exists.

What no model is needed for is checked with the other settings (`burnish.config.check`).
"""

from __future__ import annotations

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.errors import UsageError


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` where the model has too few attention heads, or a number that cannot be shared out."""
    heads: int = hf_config.get_text_config().num_attention_heads
    ranks = config.sequence_parallel
    if heads % ranks:
        fitting = [each for each in range(1, heads + 1) if heads % each == 0]
        raise UsageError(
            "the processes that share tokens cannot share the attention heads",
            have=f"engine.sequence_parallel: {ranks}, {heads} heads",
            want="a number that divides the heads",
            do=f"set engine.sequence_parallel to one of {', '.join(map(str, fitting))}",
        )
