"""Make the engine that the settings name."""

from __future__ import annotations

from importlib import import_module

import torch
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.engines.torch import parallelize
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.meta_init import has_routers

_MEGATRON = "burnish.engines.megatron"


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` if the engine cannot compute or divide the model."""
    is_megatron = config.kind == "megatron"
    module = import_module(f"{_MEGATRON}.compatibility") if is_megatron else parallelize
    module.require_fitting(hf_config, config)


def settings_beside(hf_config: PretrainedConfig, config: EngineConfig) -> EngineConfig:
    """Adapt the policy's settings to another model, which may have no experts."""
    if has_routers(hf_config):
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
    """Make an engine without weights. Collective.

    Without `optim` the engine is frozen, in the compute dtype. It shares the process groups of `beside`.
    """
    if optim is None:
        config = settings_beside(hf_config, config).model_copy(update={"router_aux_loss": 0.0})
    if config.kind == "megatron":
        megatron = import_module(f"{_MEGATRON}.megatron_engine").MegatronEngine
        groups = beside.mesh if isinstance(beside, megatron) else None
        return megatron(hf_config, config, optim, layout=layout, device=device, mesh=groups)
    mesh = beside.mesh if isinstance(beside, TorchEngine) else None
    return TorchEngine(hf_config, config, optim, layout=layout, device=device, lora=lora, mesh=mesh)
