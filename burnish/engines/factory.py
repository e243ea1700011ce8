"""Make the engine that the settings name."""

from __future__ import annotations

from importlib import import_module

import torch
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout, require_divisible
from burnish.engines.base import Engine
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.meta_init import build_on_meta, model_sizes, router_sizes

_MEGATRON = "burnish.engines.megatron"


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` if the engine cannot compute or divide the model, or a setting needs routers that are not known.

    Raises `IncompatibleError` for a model that tensor parallelism cannot cut.
    """
    if config.kind == "megatron":
        import_module(f"{_MEGATRON}.model").llama_shape(hf_config)
    if config.router_aux_loss:
        routing = import_module("burnish.models.routing")
        routing.require_routers(hf_config, "engine.router_aux_loss")
    require_divisible(model_sizes(hf_config), config)
    if config.kind == "torch" and config.tensor_parallel > 1:
        cutting = import_module("burnish.engines.torch.tensor_parallel")
        cutting.layer_cuts(build_on_meta(hf_config), 0, config.tensor_parallel)


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

    Without `optim` the engine is frozen, in the compute dtype. It shares the process groups of `beside`.
    """
    if optim is None:
        config = settings_beside(hf_config, config).model_copy(update={"router_aux_loss": 0.0})
    require_fitting(hf_config, config)
    if config.kind == "megatron":
        megatron = import_module(f"{_MEGATRON}.megatron_engine").MegatronEngine
        groups = beside.mesh if isinstance(beside, megatron) else None
        return megatron(hf_config, config, optim, layout=layout, device=device, mesh=groups)
    mesh = beside.mesh if isinstance(beside, TorchEngine) else None
    return TorchEngine(hf_config, config, optim, layout=layout, device=device, lora=lora, mesh=mesh)
