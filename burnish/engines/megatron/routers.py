"""The router of a mixture of experts for Megatron's layer spec.

Megatron's needs a function of TransformerEngine. This one replaces the product of hidden states and weight, and the
load-balancing loss, which Megatron takes per micro-batch. Choosing experts is Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.routing import Balance, with_loss


class PlainRouter(TopKRouter):
    """Chooses experts by a linear layer in the dtype of computing, as the families' own code does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Megatron makes it on the host, and moves it when it is used. Its marks come along.
        made = self.get_parameter("weight")
        self.weight = nn.Parameter(made.detach().to(torch.cuda.current_device()))
        vars(self.weight).update(vars(made))
        self.balance: Balance | None = None
        """Adds the load-balancing loss of the next forward pass; its rows are those of this rank alone."""
        self.loss: Tensor | None = None
        """That loss, a scalar without gradient."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., experts] of hidden states [..., H]."""
        return functional.linear(input, self.weight)

    def _apply_expert_bias(self, *args: Any, **options: Any) -> None:
        """Nothing: no family here has such a bias, and Megatron compiles this anew for every layer."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and choices, both [R, experts], from logits [R, 1, experts]."""
        probabilities, chosen = super().routing(logits, padding_mask)
        if self.balance is None:
            return probabilities, chosen
        loss = self.balance.loss(logits.flatten(0, -2))
        self.loss = loss.detach()
        return with_loss(probabilities, loss), chosen
