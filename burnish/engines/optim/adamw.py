"""AdamW over local shards: one fused kernel over plain memory, whatever the layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from burnish.config.schema import OptimConfig
from burnish.distributed.device import synchronize
from burnish.distributed.host_memory import Arena
from burnish.engines.optim.state_offload import on_device, resting_zeros, waves

SLOTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per weight, by torch's names."""


def moments_dtype(config: OptimConfig) -> torch.dtype:
    """What AdamW's slots are between steps; in a step they are fp32."""
    return torch.bfloat16 if config.moments == "bf16" else torch.float32


class ShardedAdamW:
    """AdamW (arXiv 1711.05101, algorithm 2) on this rank's parts of weights. Slots are zeros from the start, so they can be loaded."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        decayed: Collection[str],
        config: OptimConfig,
        arena: Arena | None = None,
    ) -> None:
        """Take local fp32 tensors by name; weight decay applies to those in `decayed`.

        Slots in `arena` or in bf16 come to the device in fp32 for a step, some at a time.
        """
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
        self._steps, dtype = 0, moments_dtype(config)
        for tensor in held.values():
            self._adamw.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{slot: resting_zeros(tensor, arena, dtype) for slot in SLOTS},
            }
        self._rests = arena is not None or dtype is not torch.float32
        sizes = {name: len(SLOTS) * tensor.nbytes for name, tensor in held.items()}
        self._waves = waves(sizes.items()) if self._rests else [list(weights)]

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
        for names in self._waves:
            wave = {name: self._weights[name] for name in names if name in gradients}
            with self._beside(wave):
                for name, tensor in wave.items():
                    tensor.grad = gradients[name]
                self._adamw.step()
                for tensor in wave.values():
                    tensor.grad = None
        self._steps += 1
        if self._rests:
            for device in {tensor.device for tensor in self._weights.values()}:
                synchronize(device)

    def _beside(self, wave: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The slots of these weights are beside them inside the block."""
        held = [tensor for tensor in wave.values() if tensor.numel() > 0]
        if not (self._rests and held):
            return nullcontext()
        return on_device([self._adamw.state[tensor] for tensor in held], SLOTS, held[0].device)
