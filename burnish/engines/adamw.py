"""AdamW over local shards: one fused kernel over plain memory, whatever the layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from burnish.config.schema import OptimConfig

SLOTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per weight, by torch's names."""


class ShardedAdamW:
    """AdamW (arXiv 1711.05101, algorithm 2) on this rank's parts of weights.

    Slots exist, as zeros, from the start, so that they can be loaded before the first step.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], decayed: Collection[str], config: OptimConfig
    ) -> None:
        """`weights` are local tensors by name; weight decay applies to those in `decayed`."""
        self._weights = dict(weights)
        held = {name: tensor for name, tensor in weights.items() if tensor.numel() > 0}
        with_decay = [tensor for name, tensor in held.items() if name in decayed]
        plain = [tensor for name, tensor in held.items() if name not in decayed]
        groups = [
            {"params": with_decay, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True
        )
        self._steps = 0
        for tensor in held.values():
            self._adamw.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{slot: torch.zeros_like(tensor) for slot in SLOTS},
            }

    @property
    def steps(self) -> int:
        """Steps taken; the bias correction runs on it."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        for state in self._adamw.state.values():
            state["step"].fill_(float(value))

    def slots(self) -> dict[str, dict[str, Tensor]]:
        """For each slot, its local tensors by weight name; zero-size for a weight this rank holds nothing of."""
        state = self._adamw.state
        return {
            slot: {n: state[t][slot] if t.numel() > 0 else t for n, t in self._weights.items()}
            for slot in SLOTS
        }

    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """One update at learning rate `lr`; a weight without a gradient stays as it is."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, tensor in self._weights.items():
            tensor.grad = gradients.get(name)
        self._adamw.step()
        self._steps += 1
        for tensor in self._weights.values():
            tensor.grad = None
