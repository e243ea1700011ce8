"""Routers written by hand, and transformers' own load-balancing loss: what `burnish.models.routing` is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


class PrescribedRouter(nn.Module):
    """In the place of a router: sends tokens where `experts` [T, k] says."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.weight = replaced.weight
        self.normalizes: bool = getattr(replaced, "norm_topk_prob", True)
        self.experts: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.experts is not None
        logits = hidden @ self.weight.T
        exponentials = (logits - logits.detach().amax(-1, keepdim=True)).exp()
        chosen = torch.stack([row[e] for row, e in zip(exponentials, self.experts, strict=True)])
        whole = chosen if self.normalizes else exponentials
        return logits, chosen / whole.sum(-1, keepdim=True), self.experts


def routers(model: PreTrainedModel) -> list[Any]:
    """The modules that route."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def prescribe(model: PreTrainedModel) -> list[PrescribedRouter]:
    """Replace the routers of a plain model."""
    made = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate = PrescribedRouter(layer.mlp.gate)
            made.append(layer.mlp.gate)
    return made


def record_logits(model: PreTrainedModel) -> list[list[Tensor]]:
    """By router the logits of all calls to come."""
    found: list[list[Tensor]] = []
    for router in routers(model):
        found.append([])
        router.register_forward_hook(lambda _, __, out, mine=found[-1]: mine.append(out[0]))
    return found


def balancing_loss(model: PreTrainedModel, logits: list[list[Tensor]]) -> Tensor:
    """transformers' own, of all tokens."""
    of_layers = tuple(torch.cat(parts) for parts in logits)
    config = model.config
    loss = load_balancing_loss_func(of_layers, config.num_experts, config.num_experts_per_tok)
    assert isinstance(loss, Tensor)
    return loss
