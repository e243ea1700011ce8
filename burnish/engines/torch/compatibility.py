"""Whether the torch engine can divide a model as the settings say, before the model is built."""

from __future__ import annotations

import logging

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import require_divisible
from burnish.engines.torch.tensor_parallel import layer_plan
from burnish.families import family_of, names_of
from burnish.models.meta_init import model_sizes
from burnish.models.routing import require_routers

_log = logging.getLogger(__name__)


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` if a setting cannot divide the model, or needs routers that are not known.

    Log a warning for tensor parallelism of a family that Burnish does not test.
    """
    if config.router_aux_loss:
        require_routers(hf_config, "engine.router_aux_loss")
    if config.tensor_parallel > 1:
        layer_plan(hf_config)
        kind = hf_config.get_text_config().model_type
        if not family_of(kind).cuts_heads:
            _log.warning(
                "Burnish does not test tensor parallelism of model type %r (it tests %s): it follows "
                "transformers' plan; burnish check CONFIG compares a step of it with one process",
                kind,
                names_of("cuts_heads"),
            )
    require_divisible(model_sizes(hf_config), config)
