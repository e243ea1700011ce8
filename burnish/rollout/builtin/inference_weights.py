"""The built-in generator's copy of the model, and how the engine's weights get into it.

Every process holds the whole model in the compute dtype, filled from the engine's shards of any layout. With an adapter beside
the weights, the model's own arrive once and later calls bring only A and B. Left out: quantized weights, tensor parallelism.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication
from burnish.boxes.transfer import Transfer
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.models.logprobs import LogitTransform
from burnish.models.meta_init import build_on_meta, materialize, position_limit
from burnish.models.names import Region, model_shards, regions
from burnish.models.scorer import logit_transform
from burnish.rollout.builtin.decoding import Network
from burnish.rollout.builtin.forward import PackedLinear, forward_of


class InferenceModel:
    """A causal language model without gradients, whose weights are undefined until `load`."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
    ) -> None:
        """Build the model; `lora` is an adapter beside the weights, None if there is none or it is merged.

        Raises `IncompatibleError` if Burnish cannot build the model, or if it lacks the layers of `lora`.
        """
        limits = (getattr(hf_config, "max_position_embeddings", None), position_limit(hf_config))
        self.max_positions: int | None = min(filter(None, limits), default=None)
        """Most tokens of a sequence; None without a limit."""
        self._model = build_on_meta(hf_config)
        self._fixed: tuple[Region, ...] | None = None
        if lora is None:
            self._changing = regions(self._model)
        else:
            adapter = import_module("burnish.models.lora.adapter").Adapter(self._model, lora)
            self._fixed, self._changing = adapter.base, adapter.weights
        self._model.requires_grad_(False).eval()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)
        materialize(self._model, device)
        self._forward = forward_of(self._model)
        self._head = PackedLinear(self._model.get_output_embeddings().weight)
        logits = partial(_logits, self._head, logit_transform(hf_config))
        self.network = Network(self._forward, logits, device, hf_config.num_hidden_layers)
        self._transfer: Transfer | None = None
        self._has_fixed = False

    def load(self, weights: Publication, layout: Layout) -> None:
        """See `Generator.load_weights`. Every call must bring the same shards."""
        if self._fixed is not None and not self._has_fixed:
            have, want = list(weights.fixed), list(model_shards(self._model, parts=self._fixed))
            Transfer(have, want, layout).run(have, want)
            self._refresh()
            self._has_fixed = True
        have, want = list(weights.changing), list(model_shards(self._model, parts=self._changing))
        if self._transfer is None:
            self._transfer = Transfer(have, want, layout)
        self._transfer.run(have, want)
        if self._fixed is None:
            self._refresh()

    def _refresh(self) -> None:
        self._forward.refresh()
        self._head.refresh()


def _logits(head: PackedLinear, transform: LogitTransform, hidden: Tensor) -> Tensor:
    """Return fp32 logits as `Scorer` computes them, in new memory."""
    return transform.apply_(head(hidden).float())
