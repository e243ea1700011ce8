"""Whether a model can be cut as the settings say, before any of it exists.

What no model is needed for is checked with the other settings (`burnish.config.check`).
"""

from __future__ import annotations

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.engines.tensor_parallel import FAMILIES
from burnish.errors import UsageError
from burnish.models.routing import require_routers


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` where attention heads cannot be shared out as the settings say, or the family's matrices not at all, or routers are not known."""
    if config.router_aux_loss:
        require_routers(hf_config, "engine.router_aux_loss")
    text = hf_config.get_text_config()
    heads: int = text.num_attention_heads
    key_heads: int = getattr(text, "num_key_value_heads", None) or heads
    tensor, sequence = config.tensor_parallel, config.sequence_parallel
    if tensor > 1 and text.model_type not in FAMILIES:
        raise UsageError(
            f"tensor parallelism does not know models of type {text.model_type}",
            have=f"engine.tensor_parallel: {tensor}",
            want=f"one of {', '.join(sorted(FAMILIES))}",
            do="set engine.tensor_parallel=1; engine.sequence_parallel works for every family",
        )
    if key_heads % tensor:
        raise _indivisible("engine.tensor_parallel", tensor, key_heads, "key heads")
    if heads // tensor % sequence:
        of_each = f"heads on each of {tensor} tensor ranks" if tensor > 1 else "heads"
        raise _indivisible("engine.sequence_parallel", sequence, heads // tensor, of_each)


def _indivisible(setting: str, ranks: int, heads: int, what: str) -> UsageError:
    fitting = [str(each) for each in range(1, heads + 1) if heads % each == 0]
    return UsageError(
        f"{setting} does not divide the attention heads",
        have=f"{setting}: {ranks}, {heads} {what}",
        want="as many heads on every process",
        do=f"set {setting} to one of {', '.join(fitting)}",
    )
