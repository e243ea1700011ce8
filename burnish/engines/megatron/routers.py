"""The router of a mixture of experts, as a module of Megatron's layer spec.

Megatron's own asks for a function of TransformerEngine even where that is not installed. Only the
product of hidden states and weight is replaced; choosing experts is Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn import functional


class PlainRouter(TopKRouter):
    """Chooses experts by a linear layer in the dtype of computing, as the families' own code does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Megatron makes it on the host, and moves it when it is used. Its marks come along.
        made = self.get_parameter("weight")
        self.weight = nn.Parameter(made.detach().to(torch.cuda.current_device()))
        vars(self.weight).update(vars(made))

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., experts] of hidden states [..., H]."""
        return functional.linear(input, self.weight)
