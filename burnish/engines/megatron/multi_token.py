"""Multi-token prediction: a layer of ours behind the model, made of the model's own kind of decoder layer.

arXiv 2412.19437, section 2.2, with one layer. For a hidden state h_t of the model, behind its last norm, and the next token's embedding e_{t+1}

    h'_t = M [norm(e_{t+1}); norm(h_t)],    logits of token t + 2 = W norm(layer(h'_t)),

where W is the model's output layer (equations 21 to 23). The loss is the model's plus λ times the same loss of these logits (equations 24 and
25): a sum over the trained tokens, divided by the number of all trained tokens, also of those that have fewer than two tokens before them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from burnish.engines.megatron.modules import Packing, whole_linear
from burnish.models.mtp_names import MTPNames
from burnish.models.names import Region
from burnish.models.packing import RowMap, on_device
from burnish.models.scorer import ScoringPlan, scored_tokens
from burnish.records import MicroBatch, plan_on_device

WEIGHT = 0.1
"""λ: that of DeepSeek-V3's later training, and Megatron's default."""
_LAYER = "multi_token.layer."


class MultiTokenLayer(nn.Module):
    """An MTP layer. Its matrix M is whole on every tensor rank, which computes it for its own tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: ModuleSpec,
        norm: Any,
        groups: ProcessGroupCollection,
        names: MTPNames,
    ) -> None:
        """`layer` describes the decoder layer, and `norm` is the class of the norms."""
        super().__init__()
        self.names = names
        self.config = config
        hidden = config.hidden_size
        self.enorm, self.hnorm, self.norm = (
            norm(config, hidden, config.layernorm_epsilon) for _ in range(3)
        )
        self.eh_proj = whole_linear(config, hidden, inputs=2 * hidden)
        number = config.num_layers + 1  # Megatron counts from 1
        self.layer = build_module(layer, config=config, layer_number=number, pg_collection=groups)

    def forward(self, hidden: Tensor, embedded: Tensor, packing: Packing) -> Tensor:
        """Return normed states from the model's `hidden` states and the next tokens' embeddings, all [C, 1, H]."""

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
            output: Tensor = self.layer(
                hidden_states=self.eh_proj(joined), attention_mask=None, packed_seq_params=packing
            )[0]
            return output

        if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            return self.norm(checkpoint(run, False, hidden, embedded))
        return self.norm(run(hidden, embedded))

    def outside(self, name: str) -> str:
        """Return the checkpoint's name of a parameter `name` of the stage; "" for one of the decoder layer."""
        part = name.removeprefix("multi_token.").removesuffix(".weight")
        return self.names.parts.get(part, "")

    def in_model(self, name: str) -> str:
        """Return the name that a parameter of the decoder layer has in the layer of the model that is like it."""
        return f"decoder.layers.{self.names.like}.{name.removeprefix(_LAYER)}"

    def renamed(self, region: Region, name: str) -> Region:
        """Return the region of this layer's parameter `name` for that in the layer that is like it."""
        return replace(region, name=self.names.of_layer(region.name), parameter=name)


def plan_ahead(plan: ScoringPlan, micro: MicroBatch, device: torch.device) -> ScoringPlan:
    """Return the plan of an MTP layer for that of the model, which computes every token of the micro-batch.

    Its inputs are the next tokens, 0 at a sequence's end. It scores trained tokens that have two before them.
    """
    deal = plan.deal
    ids = micro.input_ids.numpy()
    ends = micro.cu_seqlens.numpy()
    following = np.append(ids[1:], 0)
    following[ends[1:] - 1] = 0
    has_two = micro.loss_mask.numpy().copy()
    # Behind a sequence of one token this is the next one's first, which is not scored either.
    seconds = ends[:-1] + 1
    has_two[seconds[seconds < len(ids)]] = False
    scored = scored_tokens(micro.cu_seqlens, torch.from_numpy(has_two)).numpy()
    predictors = scored - 2
    own = deal.owner(predictors) == deal.rank
    return replace(
        plan,
        input_ids=on_device(deal.mine(following), device),
        predictors=plan_on_device(RowMap.of(deal.place(predictors[own]), device), device),
        targets=on_device(ids[scored[own]], device),
        predicted=on_device(scored[own], device),
        results=plan_on_device(RowMap.of(scored, device), device),
        scored=on_device(scored, device),
        learned=None,
    )
