"""The Megatron engine: tensor, pipeline, expert and data parallelism of Megatron-Core.

Main weights, optimizer state and gradient reduction are fp32, compute is bf16 or fp32. Without CUDA the same code runs over gloo
(`burnish.engines.megatron.host`). Left out: adapters, activation offloading, compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication, Shard, ShardSource
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import LossFn, Part
from burnish.engines.megatron.compatibility import llama_shape, require_fitting
from burnish.engines.megatron.distributed_optimizer import MegatronOptimizer, MegatronShards
from burnish.engines.megatron.host import megatron_called
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.model import build_stages
from burnish.engines.megatron.schedule import Schedule
from burnish.engines.offload import parked
from burnish.engines.sharded_engine import ShardedEngine, trained
from burnish.models.kernels.ulysses import Division
from burnish.models.value_head import has_value_head
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats


class MegatronEngine(ShardedEngine):
    """A causal language model, or one with a value head, trained with Megatron-Core; implements `burnish.engines.base.Engine`.

    Without `optim` it is frozen, in the compute dtype: `forward`, `published` and `load(source, Part.WEIGHTS)` only. Weights are
    undefined until loaded.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: EngineConfig,
        optim: OptimConfig | None,
        *,
        layout: Layout,
        device: torch.device,
        mesh: MegatronMesh | None = None,
    ) -> None:
        """`mesh`: that of another engine at this layout, to be shared; made here when not given."""
        require_fitting(hf_config, config)
        layout = replace(
            layout,
            sequence=config.sequence_parallel,
            tensor=config.tensor_parallel,
            pipeline=config.pipeline_parallel,
        )
        self.mesh = mesh or MegatronMesh.of(config, device)
        """Its process groups, and host memory."""
        super().__init__(config, layout, device, self.mesh.arena)
        self._owns_mesh = mesh is None
        self._optimizer: MegatronOptimizer | None = None
        with megatron_called():
            stages = build_stages(hf_config, config, self.mesh, device)
            if optim is not None:
                self._optimizer = MegatronOptimizer(stages, config, optim, self.mesh, layout)
        self._chunks = stages if self._optimizer is None else self._optimizer.chunks
        parts = [] if self._optimizer is None else self._optimizer.parts
        self._shards = MegatronShards(self._chunks, hf_config, parts)
        self._routers = llama_shape(hf_config).routers
        self._said = ("values",) if has_value_head(hf_config) else ("logprobs", "entropy")
        """What the model says of each token."""
        self._schedule = Schedule(
            self._chunks,
            _division(config, self.mesh),
            config.pipeline_parallel if config.virtual_stages > 1 else 1,
            device,
            self._routers,
            self.mesh.groups,
        )

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """Run every micro-batch and add up gradients, which `optim_step` reduces; see `Engine.forward_backward`."""
        trained(self._optimizer)
        batch, factors, of_experts = self._balanced(batch, *self._routers)
        stats, total = Stats(), torch.zeros((), dtype=torch.float32, device=self._device)

        def of_micro(outputs: TokenOutputs, micro: MicroBatch) -> Tensor:
            nonlocal stats, total
            value, found = loss(outputs, micro.to(self._device))
            stats = stats.merge(found)
            total += value.detach()
            return value

        with megatron_called():
            for chunk in self._chunks:
                chunk.train()
            of_routers, passed = self._schedule.forward_backward(batch, of_micro, factors)
        self.passed += passed
        # Of a pipeline the last stage alone has statistics, so its ranks do not count several times.
        counted = replace(self.layout, pipeline=1)
        of_routers *= counted.sharing  # each of which has routers or rows of its own
        return Stats(self._reduced(stats, total, of_routers, counted) | of_experts)

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """What the model says of this rank's micro-batches, without gradients; see `Engine.forward`."""
        with megatron_called():
            for chunk in self._chunks:
                chunk.eval()
            found, chosen = self._schedule.forward(batch.microbatches, record=experts)
        lengths = [len(micro.input_ids) for micro in batch.microbatches]
        values = torch.zeros(len(self._said), sum(lengths), device=self._device)
        if found:
            for name, row in zip(self._said, values, strict=True):
                torch.cat([getattr(output, name) for output in found], out=row)
        if self.layout.pipeline > 1:
            dist.broadcast(values, group=self.mesh.groups.pp, group_src=self.layout.pipeline - 1)
        outputs = [
            TokenOutputs(**dict(zip(self._said, of_micro, strict=True)))
            for of_micro in torch.split(values, lengths, dim=1)
        ]
        if not experts:
            return outputs
        return [replace(output, experts=e) for output, e in zip(outputs, chosen, strict=True)]

    @torch.no_grad()
    def optim_step(self, lr: float) -> Stats:
        """Reduce, clip, step, zero the gradients; see `Engine.optim_step`."""
        optimizer = trained(self._optimizer)
        with megatron_called():
            norm = optimizer.reduce()
            optimizer.step(lr, norm)
        return self._stepped(norm, lr)

    def shards(self, what: Part) -> Iterator[Shard]:
        """This rank's pieces of the weights, or of the optimizer's slots."""
        if what is Part.WEIGHTS:
            yield from self._shards.weights()
        if what is Part.TRAINING:
            trained(self._optimizer)
            yield from self._shards.slots()

    def published(self) -> Publication:
        """This rank's pieces of the model; see `Engine.published`."""
        return Publication(self._shards.model())

    def load(self, source: ShardSource, what: Part) -> None:
        """Fill this rank's pieces from `source`."""
        if what is Part.WEIGHTS:
            with megatron_called():
                self._shards.fill(source)
        else:
            source.fill(self.shards(what))

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Weights, gradients and slots are in host memory inside the block; see `Engine.parked`."""
        tensors = [parameter.data for chunk in self._chunks for parameter in chunk.parameters()]
        tensors += [] if self._optimizer is None else self._optimizer.tensors()
        with parked(tensors, self.arena, self._device, self.layout):
            yield

    def close(self) -> None:
        """Free the model and the optimizer, and the groups if they were made here. Collective."""
        del self._chunks, self._optimizer, self._shards, self._schedule
        if self._owns_mesh:
            self.mesh.close()


def _division(config: EngineConfig, mesh: MegatronMesh) -> Division:
    scattered = config.megatron_sequence_parallel and config.tensor_parallel > 1
    return Division(
        mesh.groups.cp if config.sequence_parallel > 1 else None,
        config.tensor_parallel if scattered else 1,
    )
