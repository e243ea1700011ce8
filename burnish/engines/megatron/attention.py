"""Attention over packed sequences for Megatron's layer spec, and the norm beside it.

Megatron's core attention needs TransformerEngine for packed sequences. This one is the torch engine's, with Ulysses if ranks
share tokens (Megatron's context parallelism by all-to-all). Left out: dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from burnish.models.kernels.attention import Attends
from burnish.models.kernels.fused import rms_norm, rotate
from burnish.models.routing import Routing


@dataclass
class Packing(PackedSeqParams):
    """Travels through Megatron's layers beside a micro-batch's hidden states; only `PackedAttention` reads it."""

    attends: Attends | None = None
    """Which tokens see each other."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Of each token, as `burnish.models.kernels.fused.rotate` takes it."""
    routing: Routing | None = None
    """What routers do (`burnish.engines.megatron.replay`); None: nothing out of the ordinary."""


class PackedAttention(nn.Module):
    """Grouped attention with rotary positions; called by Megatron's self-attention between its two linear layers."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sliding_window: int | None = None,
        **others: Any,
    ) -> None:
        """`sliding_window`: tokens that a token sees, itself included; None: all before it. `others` are Megatron's and unused."""
        super().__init__()
        self.layer_number = layer_number
        self.sliding_window = sliding_window
        self.scaling = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: Packing,
        **others: Any,
    ) -> Tensor:
        """Attend: queries [T, 1, heads, d], keys and values [T, 1, key heads, d] to [T, 1, heads · d]."""
        packing, rotation = packed_seq_params.attends, packed_seq_params.rotation
        assert packing is not None
        assert rotation is not None
        rows = [rotate(query[:, 0], rotation), rotate(key[:, 0], rotation), value[:, 0]]
        query, key, value = (part.transpose(0, 1)[None] for part in rows)
        output = packing.attend(self, query, key, value, self.scaling, self.sliding_window)
        return output[0].flatten(1)[:, None]


class RMSNorm(nn.Module):
    """RMSNorm of this rank's tokens.

    Under sequence parallelism the weight's gradient is summed over the tensor group; a mark on the weight tells Megatron.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape [..., hidden_size]."""
        return rms_norm(hidden, self.weight, self.epsilon)
