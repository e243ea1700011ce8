"""AdamW by Megatron's distributed optimizer, over gradients that its DDP accumulates.

Main weights and moments are fp32; each data-parallel rank has a flat range of them. Gradients are summed in fp32. Moments on the
host (`engine.optimizer_offload`) or in bf16 (`optim.moments`) come to the device in fp32 for their step, some at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.collectives import agree
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.base import compute_dtype
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.model import PackedGPT
from burnish.engines.offload import step_in_waves, zero_slot
from burnish.engines.optim.optimizer import SLOTS, moments_dtype


class MegatronOptimizer:
    """The optimizer of this rank's stages. Making it is collective; all is called inside `megatron_called`."""

    def __init__(
        self,
        stages: Sequence[PackedGPT],
        config: EngineConfig,
        optim: OptimConfig,
        mesh: MegatronMesh,
        layout: Layout,
    ) -> None:
        self.chunks = [_wrapped(stage, mesh) for stage in stages]
        """The stages with the buffers that their gradients are added up in."""
        self._config, self._optim, self._mesh = config, optim, mesh
        self._chained = get_megatron_optimizer(
            _settings(config, optim),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.parts = [o for o in self._chained.chained_optimizers if not o.is_stub_optimizer]
        """Of which it is made: one for experts, one for all else, as far as this rank has any."""
        with agree(layout):  # a rank may have no room in the arena
            arena, dtype = mesh.arena if config.optimizer_offload else None, moments_dtype(optim)
            for part in self.parts:
                prepare_slots(part.optimizer, arena, dtype)
        self._rests = config.optimizer_offload or dtype is not torch.float32
        self._steps = 0
        self.zero_grad()

    @property
    def steps(self) -> int:
        """Steps taken; Adam's bias correction runs on it."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        for part in self.parts:
            set_steps(part.optimizer, value)

    def reduce(self) -> float:
        """Add the gradients up over all ranks, once a step; their global 2-norm. Collective."""
        finalize_model_grads(self.chunks, None, pg_collection=self._mesh.groups)
        self._chained.prepare_grads()
        return float(self._chained.get_grad_norm())

    def step(self, lr: float, norm: float) -> None:
        """Clip reduced gradients of this norm and step, unless it is not finite; then forget them. Collective."""
        if math.isfinite(norm):
            for part in self.parts:
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(), self._config.max_grad_norm, norm
                )
            for group in self._chained.param_groups:
                group["lr"] = lr
                group["weight_decay"] = self._optim.weight_decay * group["wd_mult"]
            if self._rests:
                for part in self.parts:
                    step_offloaded(part.optimizer, self._steps)
            self._chained.step_with_ready_grads()  # and brings the weights to the model
            self._steps += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Make all gradients zero; their buffers stay."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._chained.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds: gradients, main weights, moments."""
        for chunk in self.chunks:
            yield from (parameter.main_grad for parameter in chunk.parameters())
        for part in self.parts:
            yield from part.get_parameters()
            for state in part.optimizer.state.values():
                yield from (held for held in state.values() if isinstance(held, Tensor))


def _wrapped(stage: PackedGPT, mesh: MegatronMesh) -> DistributedDataParallel:
    _empty(stage)
    return DistributedDataParallel(
        config=stage.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=False,
        ),
        module=stage,
        pg_collection=mesh.groups,
    )


def _empty(stage: PackedGPT) -> None:
    """Free unloaded weights, which Megatron copies to its own buffer; they keep their shapes, with strides of 0."""
    for parameter in stage.parameters():
        element = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
        strides = [0] * parameter.dim()
        parameter.data = element.new_empty(0).set_(
            element.untyped_storage(), 0, parameter.shape, strides
        )


def _settings(config: EngineConfig, optim: OptimConfig) -> OptimizerConfig:
    """AdamW as the settings say; the learning rate and the weight decay are given at each step."""
    dtype = compute_dtype(config)
    return OptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=True,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=config.max_grad_norm,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=True,
    )


def prepare_slots(optimizer: Any, arena: Arena | None, dtype: torch.dtype) -> None:
    """Make zero moments, so that they can be loaded and saved before the first step; in the arena if there is one.

    Takes Megatron's inner optimizer: torch's AdamW, or a fused one of TransformerEngine or Apex.
    """
    for weight in _weights_of(optimizer):
        optimizer.state[weight] |= {slot: zero_slot(weight.data, arena, dtype) for slot in SLOTS}
    set_steps(optimizer, 0)


def step_offloaded(optimizer: Any, steps: int) -> None:
    """Step every weight, with offloaded moments, after `steps` steps; gradients are gone afterwards."""
    weights = list(_weights_of(optimizer))
    gradients = [(weight, weight.grad) for weight in weights]
    for weight in weights:
        weight.grad = None
    step_in_waves(optimizer, gradients, SLOTS, steps)


def set_steps(optimizer: Any, steps: int) -> None:
    """Set how many steps were taken; Adam's bias correction runs on it.

    torch's AdamW counts steps per weight, the fused ones per group.
    """
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = steps
            continue
        on_device = group["fused"] or group["capturable"]
        for weight in group["params"]:
            device = weight.device if on_device else None
            count = torch.tensor(float(steps), dtype=torch.float32, device=device)
            optimizer.state[weight]["step"] = count


def _weights_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
