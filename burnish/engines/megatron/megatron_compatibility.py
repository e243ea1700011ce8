"""Whether Megatron can divide a model as the settings say, before the model is built."""

from __future__ import annotations

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import require_divisible
from burnish.engines.megatron.families import Architecture
from burnish.models.meta_init import model_sizes
from burnish.models.routing import require_routers


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` for an unknown family, settings that cannot divide the model, or a router loss without routers."""
    Architecture.of(hf_config)
    if config.router_aux_loss:
        require_routers(hf_config, "engine.router_aux_loss")
    require_divisible(model_sizes(hf_config), config)
