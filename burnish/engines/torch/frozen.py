"""A frozen model for inference, on the trained models' layout, in the compute dtype."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.engines.base import compute_dtype
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.meta_init import build_on_meta


class FrozenEngine(TorchEngine):
    """A `TorchEngine` without gradients, slots and fp32 weights: `forward` and `load(source, Part.WEIGHTS)` are all it is for."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: EngineConfig,
        *,
        layout: Layout,
        device: torch.device,
        mesh: Mesh | None = None,
    ) -> None:
        config = config.model_copy(update={"router_aux_loss": 0.0})
        super().__init__(hf_config, config, None, layout=layout, device=device, mesh=mesh)

    def _build(self, hf_config: PretrainedConfig) -> PreTrainedModel:
        model, dtype = build_on_meta(hf_config), compute_dtype(self._config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model
