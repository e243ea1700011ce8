"""Make the engine that the settings name. Megatron's is imported by name, since it needs an extra."""

from __future__ import annotations

from importlib import import_module

import torch
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.engines.torch import compatibility as fitting
from burnish.engines.torch.frozen import FrozenEngine
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import UsageError
from burnish.models.routing import has_routers

_MEGATRON = "burnish.engines.megatron"


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` where the engine cannot compute the model, or cannot cut it as the settings say."""
    if config.kind == "megatron":
        import_module(f"{_MEGATRON}.megatron_compatibility").require_fitting(hf_config, config)
    else:
        fitting.require_fitting(hf_config, config)


def settings_beside(hf_config: PretrainedConfig, config: EngineConfig) -> EngineConfig:
    """Return the policy's settings for a model beside it; without experts, expert settings are dropped."""
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
    """Make an engine without weights; without `optim` it cannot be trained. Collective.

    `beside` is an engine of the same settings whose process groups it shares. Raises `UsageError` for adapters and other optimizers
    than AdamW on Megatron.
    """
    if config.kind == "megatron":
        make = import_module(f"{_MEGATRON}.megatron_engine").MegatronEngine
        _require_of_megatron(optim, lora)
        groups = beside.mesh if isinstance(beside, make) else None
        engine: Engine = make(hf_config, config, optim, layout=layout, device=device, mesh=groups)
        return engine
    mesh = beside.mesh if isinstance(beside, TorchEngine) else None
    return TorchEngine(hf_config, config, optim, layout=layout, device=device, lora=lora, mesh=mesh)


def _require_of_megatron(optim: OptimConfig | None, lora: LoraConfig | None) -> None:
    """Refuse an adapter and other optimizers, which Megatron would silently ignore."""
    given = {"model.lora": lora, "optim.kind": optim and optim.kind}
    for setting, value in given.items():
        if value not in (None, "adamw"):
            raise UsageError(
                f"the megatron engine does not have {setting}",
                have=f"{setting}: {value}, engine.kind: megatron",
                want="engine.kind torch, or a run without it",
                do=f"set engine.kind=torch, or change {setting}",
            )


def make_frozen(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    *,
    layout: Layout,
    device: torch.device,
    beside: Engine | None = None,
) -> Engine:
    """Make an engine for inference alone, with weights in the compute dtype; see `make_engine`."""
    if config.kind == "megatron":
        asked = settings_beside(hf_config, config).model_copy(update={"router_aux_loss": 0.0})
        return make_engine(hf_config, asked, None, layout=layout, device=device, beside=beside)
    mesh = beside.mesh if isinstance(beside, TorchEngine) else None
    return FrozenEngine(hf_config, config, layout=layout, device=device, mesh=mesh)
