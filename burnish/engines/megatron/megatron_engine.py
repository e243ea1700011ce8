"""The Megatron engine: tensor, pipeline, expert and data parallelism of Megatron-Core.

Main weights, optimizer state and gradient reduction are fp32, compute is bf16 or fp32. Not supported: activation offloading, compilation.

Ranks that share micro-batches must pass the same ones. A micro-batch is planned, and takes device memory, when this rank's first
stage needs it. The last stage computes log-probs and losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication, Shard, ShardSource
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout, require_divisible
from burnish.distributed.tensor_collectives import all_gather_rows
from burnish.engines.base import Engine, LossFn, Part
from burnish.engines.megatron.distributed_optimizer import MegatronOptimizer, MegatronShards
from burnish.engines.megatron.gated_delta_net import require_divisible_heads
from burnish.engines.megatron.host import megatron_called
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.model import (
    build_stages,
    pipeline_layout,
    require_dispatcher,
    router_biases,
)
from burnish.engines.megatron.traits import model_traits
from burnish.engines.offload import offloaded
from burnish.engines.sharded_engine import ShardedEngine, trained
from burnish.errors import UsageError
from burnish.models.heads import has_value_head
from burnish.models.routing import Routing, index_dtype, tokens_of
from burnish.models.scorer import ScoringPlan
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats, Sum

if TYPE_CHECKING:
    from burnish.models.mtp_names import MTPNames

_LossOf = Callable[..., Tensor]
"""Returns the scalar that the backward pass of a micro-batch starts from, given its `TokenOutputs`, itself, and the outputs of an MTP layer if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    plan: ScoringPlan
    temperature: float
    routing: Routing | None
    """Instructions to the routers; None: they route as usual."""
    micro: MicroBatch | None
    """None for a filler, which completes a pipeline's round and counts for nothing."""
    ahead: ScoringPlan | None = None
    """What the layer for multi-token prediction predicts, if it is trained."""


class MegatronEngine(ShardedEngine):
    """A model trained with Megatron-Core; implements `burnish.engines.base.Engine`.

    Without `optim` it is frozen, in the compute dtype. With `lora` an adapter is trained beside a frozen model. Weights are undefined until
    `load(source, Part.WEIGHTS)`, and `Part.FROZEN` with an adapter.
    """

    def __init__(  # noqa: PLR0913
        self,
        hf_config: PretrainedConfig,
        config: EngineConfig,
        optim: OptimConfig | None,
        *,
        layout: Layout,
        device: torch.device,
        beside: Engine | None = None,
        lora: LoraConfig | None = None,
        mtp: MTPNames | None = None,
    ) -> None:
        """See `Engine`."""
        layout = replace(
            layout,
            sequence=config.sequence_parallel,
            tensor=config.tensor_parallel,
            pipeline=config.pipeline_parallel,
        )
        shared = beside.mesh if isinstance(beside, MegatronEngine) else None
        self.mesh: MegatronMesh = shared or MegatronMesh.of(config, device)
        """The engine's process groups and host memory."""
        super().__init__(hf_config, config, layout, device, self.mesh.arena)
        self._owns_mesh = shared is None
        self._optimizer: MegatronOptimizer | None = None
        with megatron_called():
            stages = build_stages(
                hf_config, config, self.mesh, device, adapted=lora is not None, mtp=mtp
            )
            self._adapter = None
            if lora is not None:
                from burnish.engines.megatron.adapters import StageAdapters

                self._adapter = StageAdapters(stages, lora, hf_config)
            adapted = None if self._adapter is None else self._adapter.regions
            self._merges = lora is not None and lora.publish == "merged"
            if optim is not None:
                self._optimizer = MegatronOptimizer(
                    stages, hf_config, config, optim, self.mesh, layout, adapted
                )
        trains = self._optimizer
        self._chunks = trains.chunks if trains else stages
        self._shards = trains.shards if trains else MegatronShards(stages, hf_config, [], adapted)
        self._trains_mtp = mtp is not None
        self._outputs = ("values",) if has_value_head(hf_config) else ("logprobs", "entropy")
        """The model's outputs per token, as fields of `TokenOutputs`."""
        scatters = config.megatron_sequence_parallel and config.tensor_parallel > 1
        group = self.mesh.groups.cp if config.sequence_parallel > 1 else None
        self._sharing = group, config.tensor_parallel if scatters else 1

    @staticmethod
    def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
        """See `Engine.require_fitting`."""
        traits = model_traits(hf_config)
        require_divisible(traits.sizes, config)
        require_divisible_heads(traits, config.tensor_parallel)
        pipeline_layout(traits.sizes.depth, config)
        require_dispatcher(config)
        if "mla_up_proj" in config.megatron.recompute_modules and traits.latent is None:
            raise UsageError(
                "engine.megatron.recompute_modules names a module that the model has not",
                have=f"mla_up_proj, a model of type {hf_config.model_type}",
                want="mla_up_proj for models with latent attention",
                do="remove it there; core_attn recomputes this model's attention",
            )
        if traits.shared_width % config.tensor_parallel:
            raise UsageError(
                "engine.tensor_parallel does not divide the expert that every token goes to",
                have=f"engine.tensor_parallel: {config.tensor_parallel}, {traits.shared_width} columns",
                want="a divisor of its columns",
                do="lower engine.tensor_parallel",
            )

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """See `Engine.forward_backward`."""
        optimizer = trained(self._optimizer)
        batch, factors, of_experts = self._balanced(batch)
        optimizer.begin_backward()
        numbers = torch.zeros(3, dtype=torch.float32, device=self._device)
        stats, (total, aux, of_mtp) = Stats(), numbers
        routings: list[Routing] = []

        def planned() -> Iterator[_Planned]:
            for micro, is_filler in zip(batch.microbatches, batch.is_filler, strict=True):
                balance = None if is_filler else factors
                counts = self._bias_updates is not None and not is_filler
                planned_micro = self._planned(
                    micro, loss, record=counts, factors=balance, trains_mtp=self._trains_mtp
                )
                self.passed += planned_micro.plan.passed
                if planned_micro.routing is not None and not is_filler:
                    routings.append(planned_micro.routing)
                yield planned_micro

        def of_micro(outputs: TokenOutputs, micro: MicroBatch, *ahead: TokenOutputs) -> Tensor:
            nonlocal stats, total, of_mtp
            there = micro.to(self._device)
            value, micro_stats = loss(outputs, there)
            stats = stats.merge(micro_stats)
            for later in ahead:
                from burnish.engines.megatron.multi_token import WEIGHT

                of_ahead, _ = loss(later, there)
                of_mtp += of_ahead.detach()
                value = value + WEIGHT * of_ahead
            total += value.detach()
            return value

        self._run(planned(), len(batch.microbatches), of_micro)
        for routing in routings:
            aux += sum(routing.losses.values())
            if self._bias_updates is not None:
                self._bias_updates.count(routing)
        # Only the last stage of a pipeline has statistics, so a pipeline's ranks count once.
        counted = replace(self.layout, pipeline=1)
        aux *= counted.sharing  # these ranks differ in routers or rows; reducing divides by it
        if self._trains_mtp:
            stats = stats.merge(Stats(mtp_loss=Sum(of_mtp)))
        return Stats(self._reduced(stats, total, aux, counted) | of_experts)

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """See `Engine.forward`."""
        if self._adapter is not None and not adapter:
            with self._adapter.off():
                return self.forward(batch, experts=experts)
        self._require_routers(batch, record=experts)
        collected: list[TokenOutputs] = []
        recorded: list[tuple[Mapping[int, Tensor], ScoringPlan]] = []

        def planned() -> Iterator[_Planned]:
            for micro in batch.microbatches:
                planned_micro = self._planned(micro, record=experts)
                if experts and planned_micro.routing is not None:
                    recorded.append((planned_micro.routing.chosen, planned_micro.plan))
                yield planned_micro

        def keep(outputs: TokenOutputs, micro: MicroBatch) -> Tensor:
            collected.append(outputs)
            return torch.zeros((), device=self._device)

        self._run(planned(), len(batch.microbatches), keep, forward_only=True)
        chosen = [self._record(*each) for each in recorded]
        lengths = [len(micro.input_ids) for micro in batch.microbatches]
        values = torch.zeros(len(self._outputs), sum(lengths), device=self._device)
        if collected:
            for name, row in zip(self._outputs, values, strict=True):
                torch.cat([getattr(output, name) for output in collected], out=row)
        if self.layout.pipeline > 1:
            dist.broadcast(values, group=self.mesh.groups.pp, group_src=self.layout.pipeline - 1)
        outputs = [
            TokenOutputs(**dict(zip(self._outputs, of_micro, strict=True)))
            for of_micro in torch.split(values, lengths, dim=1)
        ]
        if not experts:
            return outputs
        return [replace(output, experts=e) for output, e in zip(outputs, chosen, strict=True)]

    @torch.no_grad()
    def optim_step(self, lr: float) -> Stats:
        """See `Engine.optim_step`."""
        optimizer = trained(self._optimizer)
        with megatron_called():
            norm = optimizer.reduce()
            optimizer.step(lr, norm)
        return self._stepped(norm, lr)

    def shards(self, what: Part) -> Iterator[Shard]:
        """See `Engine.shards`."""
        if what is Part.WEIGHTS:
            yield from self._shards.weights()
        if what is Part.FROZEN:
            yield from self._shards.frozen()
        if what is Part.TRAINING:
            trained(self._optimizer)
            yield from self._shards.slots()

    def published(self) -> Publication:
        """See `Engine.published`."""
        self._finish_exchanges()
        if self._adapter is None:
            return Publication(self._shards.model())
        weights = list(self._shards.weights())
        if not self._merges:
            return Publication(weights, self._shards.frozen())
        base = list(self._shards.frozen())
        return Publication(self._adapter.whole.merge(base, weights, self.layout))

    def load(self, source: ShardSource, what: Part) -> None:
        """See `Engine.load`."""
        self._finish_exchanges()
        if what is Part.WEIGHTS:
            with megatron_called():
                self._shards.fill(source)
        elif what is Part.FROZEN:
            self._shards.fill_frozen(source)
        else:
            source.fill(self.shards(what))

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """See `Engine.offloaded`."""
        self._finish_exchanges()
        tensors = [parameter.data for chunk in self._chunks for parameter in chunk.parameters()]
        tensors += [] if self._optimizer is None else self._optimizer.tensors()
        with offloaded(tensors, self.arena, self._device, self.layout):
            yield

    def close(self) -> None:
        """See `Engine.close`. Also destroys groups that this engine made. Collective."""
        if self._optimizer is not None:
            self._optimizer.wait()
        del self._chunks, self._optimizer, self._shards, self._adapter
        if self._owns_mesh:
            self.mesh.close()

    def _finish_exchanges(self) -> None:
        if self._optimizer is not None:
            with megatron_called():
                self._optimizer.gather()
                self._optimizer.wait()

    def _run(
        self, planned: Iterator[_Planned], count: int, loss: _LossOf, *, forward_only: bool = False
    ) -> None:
        """Pass `count` micro-batches through the pipeline. The last stage calls `loss` for each."""
        config = self._config
        rounds = config.pipeline_parallel if config.virtual_stages > 1 else 1
        fillers = [self._filler()] * (-count % rounds)

        def stage_step(batches: Iterator[_Planned], chunk: Any) -> tuple[Any, Any]:
            batch = next(batches)
            output = chunk(batch.plan, batch.temperature, batch.routing, batch.ahead)
            return output, lambda outputs: (_loss_of(batch, outputs, loss), _NO_TOKENS, None)

        with megatron_called():
            for chunk in self._chunks:
                chunk.train(not forward_only)
            get_forward_backward_func()(
                forward_step_func=stage_step,
                data_iterator=_dealt(chain(planned, fillers), len(self._chunks)),
                model=list(self._chunks),
                num_microbatches=count + len(fillers),
                # Unused: with variable lengths, each exchange sends the shape first.
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _planned(
        self,
        micro: MicroBatch,
        loss: LossFn | None = None,
        *,
        record: bool = False,
        factors: Tensor | None = None,
        trains_mtp: bool = False,
    ) -> _Planned:
        # A token that begins several sequences has several next tokens.
        plan = self._plan(micro, loss, shares=not trains_mtp)
        routing = self._routing(micro, plan, factors, record=record)
        ahead = None
        if trains_mtp:
            from burnish.engines.megatron.multi_token import plan_ahead

            ahead = plan_ahead(plan, micro, self._device)
        return _Planned(plan, micro.temperature, routing, micro, ahead)

    def _router_biases(self) -> Iterable[tuple[int, Tensor]]:
        return router_biases(self._chunks)

    def _part(self, plan: ScoringPlan) -> tuple[slice, int]:
        tensor = self.mesh.groups.tp
        own = plan.deal.rows // tensor.size()
        return slice(tensor.rank() * own, (tensor.rank() + 1) * own), 1

    def _filler(self) -> _Planned:
        ids = torch.zeros(1, dtype=torch.int64)
        ends = torch.tensor([0, 1], dtype=torch.int32)
        plan = ScoringPlan.of(ids, ends, None, self._device, *self._sharing)
        return _Planned(plan, 1.0, None, None)

    def _record(self, chosen: Mapping[int, Tensor], plan: ScoringPlan) -> Tensor:
        """Return the experts [T, L, k] of all tokens. Collective among the ranks that share the micro-batch."""
        (routers, experts, chosen_of_each), tensor = self._router_sizes, self.mesh.groups.tp
        own = plan.deal.rows // tensor.size()
        kind = index_dtype(experts)
        recorded = torch.zeros((own, routers, chosen_of_each), dtype=kind, device=self._device)
        for number, of_router in chosen.items():
            recorded[:, number] = of_router.to(kind)
        in_bytes = recorded.view(torch.uint8)  # since not every backend sends int16
        if self.mesh.groups.pp.size() > 1:  # each router is in one stage; other stages hold zeros
            dist.all_reduce(in_bytes, group=self.mesh.groups.pp)
        if tensor.size() > 1:
            in_bytes = all_gather_rows(in_bytes, tensor)
        return tokens_of(plan, in_bytes.view(kind))


def _dealt(planned: Iterable[_Planned], readers: int) -> list[Iterator[_Planned]]:
    """Return iterators that free an item once all have it; `itertools.tee` frees blocks of 57."""
    source = iter(planned)
    waiting = [deque[_Planned]() for _ in range(readers)]

    def of(own: deque[_Planned]) -> Iterator[_Planned]:
        while True:
            if not own:
                batch = next(source, None)
                if batch is None:
                    return
                for queue in waiting:
                    queue.append(batch)
            yield own.popleft()

    return [of(own) for own in waiting]


# The token count by which Megatron would divide gradients. Losses are already divided, so it is 0.
_NO_TOKENS = 0


def _loss_of(batch: _Planned, outputs: Any, loss: _LossOf) -> Tensor:
    if batch.ahead is not None:
        outputs, ahead = outputs
        return loss(outputs, batch.micro, ahead)
    if batch.micro is not None:
        return loss(outputs, batch.micro)
    output = outputs.values if len(outputs.values) else outputs.logprobs
    return output.sum() * 0.0
