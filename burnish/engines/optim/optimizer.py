"""The optimizer of this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from burnish.boxes.shards import Shard
from burnish.config.schema import OptimConfig
from burnish.distributed.collectives import agree
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.optim.slots import zero_slot
from burnish.models.names import Region, is_matrix, model_shards

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a weight, by torch's names."""
_TIE = 0x8000
# The lower half of an fp32 number and the last bit of the upper one.
_LAST_17_BITS = 0x1FFFF
# Elements that stay in a processor's cache, and those of one launch on an accelerator.
_CPU_CHUNK = 1 << 17
_CHUNK = 1 << 24


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moments_dtype(config: OptimConfig) -> torch.dtype:
    """Return the dtype of AdamW's slots between steps; in a step they are fp32."""
    return torch.bfloat16 if config.moments == "bf16" else torch.float32


def break_ties(weights: Iterable[Tensor]) -> None:
    """Move fp32 weights halfway between an even bf16 number and the next one down by one bit, in place.

    Ties to even round them down, as in a training step. A checkpoint rounds ties up, because its residual holds 16 bits. Without
    ties the model that is written has the bits of the one that was computed with.
    """
    for weight in weights:
        flat = weight.detach().view(-1).view(torch.int32)
        for bits in torch.split(flat, _CPU_CHUNK if flat.is_cpu else _CHUNK):
            # 0 for a tie, else 1; min and a sum are several times as fast as a comparison and a mask.
            is_other = bits.bitwise_and(_LAST_17_BITS).bitwise_xor_(_TIE).clamp_(max=1)
            bits.add_(is_other).sub_(1)


class ShardedOptimizer:
    """AdamW (arXiv 1711.05101, algorithm 2) on this rank's shards of `model`'s trained weights, and perhaps Muon.

    Slots exist from the start, as zeros, so they can be loaded. Making it is collective.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Sequence[Region],
        config: OptimConfig,
        layout: Layout,
        arena: Arena | None = None,
    ) -> None:
        """`regions` are the checkpoint tensors that the trained parameters hold."""
        self._model = model
        self._regions = regions
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = {name: local(p.data) for name, p in self._parameters.items()}
        self._muon = None
        if config.kind == "muon":
            from burnish.engines.optim.muon import Muon

            self._muon = muon = Muon.of_model(model, regions, weights, config, layout, arena)
            weights = {n: t for n, t in weights.items() if n not in muon.weights}
        self._weights = weights
        dtype = moments_dtype(config)
        self.steps = 0
        """Steps taken; `set_steps` sets it."""
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, tensor in weights.items():
            if tensor.numel() > 0:
                groups[is_matrix(name, self._parameters[name].ndim)].append(tensor)
        self._adamw = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._in_waves = arena is not None or dtype is not torch.float32
        with agree(layout):  # a rank may have no room in the arena
            for tensor in (*groups[True], *groups[False]):
                self._adamw.state[tensor] = {
                    "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                    **{slot: zero_slot(tensor, arena, dtype) for slot in SLOTS},
                }

    def set_steps(self, steps: int) -> None:
        """Set how many steps were taken, for Adam's bias correction."""
        self.steps = steps
        for state in self._adamw.state.values():
            state["step"].fill_(float(steps))

    def slots(self) -> dict[str, dict[str, Tensor]]:
        """Return each slot's local tensors by weight name; zero-size where this rank holds nothing."""
        state = self._adamw.state
        moments = {
            slot: {n: state[t][slot] if t.numel() > 0 else t for n, t in self._weights.items()}
            for slot in SLOTS
        }
        return moments if self._muon is None else moments | self._muon.slots

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's shards of the slots, `exp_avg/<weight>` and so on."""
        for slot, tensors in self.slots().items():
            yield from model_shards(self._model, tensors, f"{slot}/", self._regions)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients that exist, by weight name."""
        return {n: local(p.grad) for n, p in self._parameters.items() if p.grad is not None}

    def weights(self) -> Iterator[Tensor]:
        """Yield this rank's parts of the trained weights."""
        yield from (local(p.data) for p in self._parameters.values())

    def step(self, lr: float) -> None:
        """Update once; AdamW does not change a weight without a gradient. Collective for Muon."""
        gradients = self.gradients()
        for group in self._adamw.param_groups:
            group["lr"] = lr
        pairs = [
            (tensor, gradients[name])
            for name, tensor in self._weights.items()
            if name in gradients and tensor.numel() > 0
        ]
        if self._in_waves:
            from burnish.engines.offload import step_in_waves

            step_in_waves(self._adamw, pairs, SLOTS, self.steps)
        else:
            for tensor, gradient in pairs:
                tensor.grad = gradient
            self._adamw.step()
            for tensor, _ in pairs:
                tensor.grad = None
        self.steps += 1
        if self._muon is not None:
            self._muon.step(lr, gradients)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
