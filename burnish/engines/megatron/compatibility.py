"""Check that Megatron computes and divides a model."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import require_divisible
from burnish.errors import UsageError
from burnish.families import ModelShape, family_of, names_of
from burnish.models.meta_init import has_value_head, model_sizes
from burnish.models.routing import require_routers


def llama_shape(hf_config: PretrainedConfig) -> ModelShape:
    """Return the model's sizes. Raises `UsageError` naming a feature that this engine lacks."""
    kind = hf_config.model_type
    if not family_of(kind).has_llama_layers:
        raise UsageError(
            f"the Megatron engine does not know models of type {kind}",
            have=f"model_type: {kind}",
            want=f"one of {names_of('has_llama_layers')}",
            do="set engine.kind=torch",
        )
    if problem := next(_uncomputed(hf_config), None):
        raise UsageError(
            f"the Megatron engine does not compute {problem}",
            have=f"a model of type {kind} that has it",
            want="a model without it",
            do="set engine.kind=torch",
        )
    return ModelShape.of(hf_config.to_dict())


def _uncomputed(hf_config: PretrainedConfig) -> Iterator[str]:
    if hf_config.hidden_act != "silu":
        yield f"the activation {hf_config.hidden_act}"
    if getattr(hf_config, "attention_bias", False):
        yield "a bias in attention (attention_bias)"
    if getattr(hf_config, "mlp_bias", False):
        yield "a bias in the MLP (mlp_bias)"
    rope = hf_config.rope_parameters
    if rope["rope_type"] in ("dynamic", "longrope"):
        yield f"rotary positions that depend on the length ({rope['rope_type']})"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "heads that are rotated in part (partial_rotary_factor)"
    if has_value_head(hf_config):
        if hf_config.num_labels != 1:
            yield f"a head with {hf_config.num_labels} values per token"
    elif any("ForCausalLM" not in name for name in hf_config.architectures or ()):
        yield "a head that is neither a language model's nor a value head"


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` for an unknown family, settings that cannot divide the model, or a router loss without routers."""
    llama_shape(hf_config)
    if config.router_aux_loss:
        require_routers(hf_config, "engine.router_aux_loss")
    require_divisible(model_sizes(hf_config), config)
