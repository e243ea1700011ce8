"""Make the engine that the settings name."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.extend import ENGINES
from burnish.models.meta_init import router_sizes

_SETTING = "engine.kind"


def require_fitting(
    hf_config: PretrainedConfig, config: EngineConfig, lora: LoraConfig | None = None
) -> None:
    """Raise `UsageError` if the engine is none, cannot compute or divide the model, or a setting needs routers that are not known.

    Raises `IncompatibleError` for a model that it cannot cut.
    """
    ENGINES.load(config.kind, _SETTING, ["lora"] if lora else []).require_fitting(hf_config, config)
    if config.router_aux_loss:
        from burnish.models.routing import require_routers

        require_routers(hf_config, "engine.router_aux_loss")


def settings_beside(hf_config: PretrainedConfig, config: EngineConfig) -> EngineConfig:
    """Adapt the policy's settings to another model, which may have no experts."""
    if any(router_sizes(hf_config)):
        return config
    none = {"router_aux_loss": 0.0, "expert_parallel": 1, "expert_tensor_parallel": None}
    return config.model_copy(update=none)


def make_engine(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    optim: OptimConfig | None,
    *,
    layout: Layout,
    device: torch.device,
    lora: LoraConfig | None = None,
    beside: Engine | None = None,
) -> Engine:
    """Make an engine without weights. Collective. Raises as `require_fitting` does.

    Without `optim` the engine is frozen, in the compute dtype. It may share the process groups of `beside`.
    """
    if optim is None:
        config = settings_beside(hf_config, config).model_copy(update={"router_aux_loss": 0.0})
    require_fitting(hf_config, config, lora)
    options = {} if lora is None else {"lora": lora}
    kind = ENGINES.load(config.kind, _SETTING)
    engine = kind(hf_config, config, optim, layout=layout, device=device, beside=beside, **options)
    ENGINES.require_complete(engine, config.kind, _SETTING)
    return engine
