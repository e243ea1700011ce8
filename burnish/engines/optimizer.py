"""AdamW over local shards.

Parameters may be DTensors; the optimizer works on the plain local tensors inside them, so a step is
one fused kernel over plain memory whatever the layout, and its slots lie on the very boxes of the
weights. Left out: learning-rate schedules (`burnish.algorithms.schedule`) and other optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from burnish.config.schema import OptimConfig

SLOTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per weight, by torch's names."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the local tensor of a DTensor, anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedAdamW:
    """AdamW (arXiv 1711.05101, algorithm 2) on this rank's shards of `parameters`.

    Weight decay applies to weights of two and more (global) dims only. Slots exist, as zeros, from
    the start, so that they can be loaded before the first step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self._parameters = parameters
        self._local = {name: local(p.data) for name, p in parameters.items()}
        held = {name: tensor for name, tensor in self._local.items() if tensor.numel() > 0}
        decayed = [tensor for name, tensor in held.items() if parameters[name].ndim >= 2]
        plain = [tensor for name, tensor in held.items() if parameters[name].ndim < 2]
        groups = [
            {"params": tensors, "weight_decay": decay}
            for tensors, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if tensors
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
        """Steps taken; Adam's bias correction runs on it."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        for state in self._adamw.state.values():
            state["step"].fill_(float(value))

    def slot(self, slot: str) -> dict[str, Tensor]:
        """The local tensor of one slot by weight name; zero-size for a weight this rank holds nothing of."""
        return {
            name: self._adamw.state[tensor][slot] if tensor.numel() > 0 else tensor
            for name, tensor in self._local.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients by weight name, those that exist."""
        return {n: local(p.grad) for n, p in self._parameters.items() if p.grad is not None}

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`, from the parameters' gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, tensor in self._local.items():
            gradient = self._parameters[name].grad
            tensor.grad = None if gradient is None else local(gradient)
        self._adamw.step()
        self._steps += 1

    def zero_grad(self) -> None:
        """Forget the gradients, freeing their memory."""
        for name, tensor in self._local.items():
            tensor.grad = None
            self._parameters[name].grad = None
