"""Whether a model can be cut as the settings say, before any of it exists.

What no model is needed for is checked with the other settings (`burnish.config.check`).
"""

from __future__ import annotations

import logging

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.engines.torch.tensor_parallel import layer_plan
from burnish.errors import UsageError
from burnish.families import family_of, names_of
from burnish.models.routing import require_routers

_ROW_BYTES = 16
_log = logging.getLogger(__name__)


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` where attention heads cannot be shared out as the settings say, or the family's matrices not at all, or routers are not known."""
    if config.router_aux_loss:
        require_routers(hf_config, "engine.router_aux_loss")
    text = hf_config.get_text_config()
    heads: int = text.num_attention_heads
    key_heads: int = getattr(text, "num_key_value_heads", None) or heads
    tensor, sequence = config.tensor_parallel, config.sequence_parallel
    if tensor > 1:
        _require_plan(hf_config)
    _require_expert_widths(text, config)
    if key_heads % tensor:
        raise _indivisible("engine.tensor_parallel", tensor, key_heads, "key heads")
    if heads // tensor % sequence:
        of_each = f"heads on each of {tensor} tensor ranks" if tensor > 1 else "heads"
        raise _indivisible("engine.sequence_parallel", sequence, heads // tensor, of_each)


def _require_expert_widths(text: PretrainedConfig, config: EngineConfig) -> None:
    """Grouped products of experts take rows of a multiple of 16 bytes."""
    if not any(getattr(text, name, None) for name in ("num_experts", "num_local_experts")):
        return
    width: int = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    multiple = _ROW_BYTES // (2 if config.precision == "bf16" else 4)
    tensor = config.tensor_parallel
    if width % (tensor * multiple) or text.hidden_size % multiple:
        raise UsageError(
            "experts of these widths cannot be multiplied together",
            have=f"{width} columns of an expert, hidden states of {text.hidden_size}, engine.tensor_parallel: {tensor}, engine.precision: {config.precision}",
            want=f"multiples of {multiple} on every process",
            do="lower engine.tensor_parallel, or take a model of other widths",
        )


def _require_plan(hf_config: PretrainedConfig) -> None:
    """That of tensor parallelism, with a word on how to check it for a family that no test has tried."""
    layer_plan(hf_config)
    kind = hf_config.get_text_config().model_type
    if not family_of(kind).cuts_heads:
        _log.warning(
            "tensor parallelism of model type %r is not among what Burnish tests (%s): it follows transformers' plan; "
            "burnish check CONFIG compares a step of it with one process",
            kind,
            names_of("cuts_heads"),
        )


def _indivisible(setting: str, ranks: int, heads: int, what: str) -> UsageError:
    fitting = [str(each) for each in range(1, heads + 1) if heads % each == 0]
    return UsageError(
        f"{setting} does not divide the attention heads",
        have=f"{setting}: {ranks}, {heads} {what}",
        want="as many heads on every process",
        do=f"set {setting} to one of {', '.join(fitting)}",
    )
