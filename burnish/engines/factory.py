"""Make the engine that the settings name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.extend import ENGINES
from burnish.families import family_of
from burnish.models.meta_init import router_sizes

if TYPE_CHECKING:
    from burnish.models.mtp_names import MTPNames

_SETTING = "engine.kind"
_UNBALANCED = {"router_aux_loss": 0.0, "router_bias_update_rate": 0.0}


def require_fitting(
    hf_config: PretrainedConfig, config: EngineConfig, options: Collection[str] = ()
) -> None:
    """Raise `UsageError` if the engine is none, cannot compute or divide the model, or a setting needs routers that are not known.

    `options` are arguments of its constructor that are used. Raises `IncompatibleError` for a model that it cannot cut.
    """
    ENGINES.load(config.kind, _SETTING, options).require_fitting(hf_config, config)
    if config.router_aux_loss:
        from burnish.models.routing import require_routers

        require_routers(hf_config, "engine.router_aux_loss")
    if config.router_bias_update_rate:
        from burnish.engines.expert_load import require_router_biases

        require_router_biases(hf_config)


def settings_beside(hf_config: PretrainedConfig, config: EngineConfig) -> EngineConfig:
    """Adapt the policy's settings to another model, which may have no experts."""
    none: dict[str, Any] = {}
    if not family_of(hf_config.get_text_config().model_type).router_bias:
        none = {"router_bias_update_rate": 0.0}
    if not any(router_sizes(hf_config)):
        none = {**_UNBALANCED, "expert_parallel": 1, "expert_tensor_parallel": None}
    return config.model_copy(update=none)


def make_engine(  # noqa: PLR0913
    hf_config: PretrainedConfig,
    config: EngineConfig,
    optim: OptimConfig | None,
    *,
    layout: Layout,
    device: torch.device,
    lora: LoraConfig | None = None,
    train: Sequence[str] = (),
    mtp: MTPNames | None = None,
    beside: Engine | None = None,
) -> Engine:
    """Make an engine without weights. Collective. Raises as `require_fitting` does.

    Without `optim` the engine is frozen, in the compute dtype. It may share the process groups of `beside`. `train` is `model.train`. `mtp`
    is a layer that is trained too.
    """
    if optim is None:
        config = settings_beside(hf_config, config).model_copy(update=_UNBALANCED)
    if lora is not None:  # it leaves the biases as they are
        config = config.model_copy(update={"router_bias_update_rate": 0.0})
    given: dict[str, Any] = {"lora": lora, "train": train, "mtp": mtp}
    options = {name: value for name, value in given.items() if value}
    require_fitting(hf_config, config, options)
    kind = ENGINES.load(config.kind, _SETTING)
    engine = kind(hf_config, config, optim, layout=layout, device=device, beside=beside, **options)
    ENGINES.require_complete(engine, config.kind, _SETTING)
    return engine
