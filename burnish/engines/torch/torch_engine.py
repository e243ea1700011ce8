"""The PyTorch engine: FSDP2 (HSDP with several copies), Ulysses and tensor parallelism on one or more processes.

Main weights and optimizer slots are fp32; compute is bf16 or fp32. One process runs the same code over a mesh of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from burnish.boxes.shards import Publication, Shard, ShardSource
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.engines.base import LossFn, Part, compute_dtype, trained
from burnish.engines.expert_load import ExpertLoad, routing_of
from burnish.engines.offload import parked
from burnish.engines.optim.optimizer import ShardedOptimizer, local
from burnish.engines.step_stats import loss_stats, optimizer_stats, skipped_in_a_row
from burnish.engines.torch.activation_offload import ActivationOffload
from burnish.engines.torch.compatibility import require_fitting
from burnish.engines.torch.gradients import norm_over, sum_over
from burnish.engines.torch.parallelize import parallelize
from burnish.models.flops import Passed
from burnish.models.kernels.liger import liger_kernels, use_kernels
from burnish.models.kernels.ulysses import Division
from burnish.models.lora.adapter import Adapter
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import cut_regions, model_shards, regions
from burnish.models.scorer import Scorer, ScoringPlan
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats


class TorchEngine:
    """A causal language model trained with FSDP2; implements `burnish.engines.base.Engine`.

    Without `optim` it is frozen: `forward` and `shards(WEIGHTS)` only. With `lora` an adapter is trained, and the model stays frozen
    in the compute dtype. Weights are undefined until `load(source, Part.WEIGHTS)`, and `Part.FROZEN` with an adapter.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: EngineConfig,
        optim: OptimConfig | None,
        *,
        layout: Layout,
        device: torch.device,
        lora: LoraConfig | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`mesh`: that of another engine at this layout, to be shared; made here when not given."""
        require_fitting(hf_config, config)
        self.layout = replace(
            layout, sequence=config.sequence_parallel, tensor=config.tensor_parallel
        )
        self._config = config
        self._device = device
        self.skipped_in_a_row, self.passed = 0, Passed()
        model = self._build(hf_config)
        if not config.compile and (kernels := liger_kernels(device)):
            use_kernels(model, kernels)
        self._adapter = None if lora is None else Adapter(model, lora, compute_dtype(config))
        self._merges = lora is not None and lora.publish == "merged"
        self._scorer = Scorer(model, config.logprob_rows(hf_config.get_text_config().vocab_size))
        if optim is None:
            self._scorer.requires_grad_(False)
        self.mesh = mesh or Mesh.of(self.layout, config.replicas, device)
        """Its process groups, and host memory."""
        self.arena = self.mesh.arena
        moves = config.activation_offload and optim is not None
        self._offload = ActivationOffload(self.arena, device) if moves else None
        self._division = Division(self.mesh.sequence, self.layout.tensor)
        whole = () if self._adapter else regions(model)
        self._cuts = parallelize(self._scorer, config, self.mesh, self._offload)
        materialize(self._scorer, device)
        if self._adapter is not None:
            self._adapter.cut(self._cuts)
        self._regions = self._adapter.weights if self._adapter else cut_regions(whole, self._cuts)
        arena = self.arena if config.optimizer_offload else None
        self._optimizer = (
            None
            if optim is None
            else ShardedOptimizer(model, self._regions, optim, self.layout, arena)
        )

    def _build(self, hf_config: PretrainedConfig) -> PreTrainedModel:
        """The model on meta, in the dtypes that its weights are kept in."""
        return build_on_meta(hf_config)

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return trained(self._optimizer).steps

    @steps.setter
    def steps(self, value: int) -> None:
        trained(self._optimizer).steps = value

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """Run every micro-batch and add up gradients; see `Engine.forward_backward`."""
        trained(self._optimizer)
        batch, factors, of_experts = self._evened(batch)
        pairs = list(zip(batch.microbatches, batch.examples, strict=True))
        self._scorer.train()
        stats, (total, aux) = Stats(), torch.zeros(2, dtype=torch.float32, device=self._device)
        for index, (micro, numbers) in enumerate(pairs):
            self._reduce_in_next_backward(last=index == len(pairs) - 1)
            with self._offload.forward_and_backward() if self._offload else nullcontext():
                plan = self._planned(micro)
                outputs = self._score(micro, plan, factors=None if numbers == (-1,) else factors)
                value, of_micro = loss(outputs, micro.to(self._device))
                value.backward()  # type: ignore[no-untyped-call]
            of_routers = outputs.router_loss.sum() * self.layout.sharing
            total += value.detach() + of_routers
            aux += of_routers
            stats = stats.merge(of_micro)
            self.passed += plan.passed
        of_balance = None if factors is None else aux / self._config.router_aux_loss
        return Stats(loss_stats(stats, total, of_balance, self.layout, self._device) | of_experts)

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """Log-probs and entropies of this rank's micro-batches, without gradients; see `Engine.forward`."""
        self._scorer.eval()
        with nullcontext() if adapter or self._adapter is None else self._adapter.off():
            return [
                self._score(micro, self._planned(micro), record=experts)
                for micro in batch.microbatches
            ]

    @torch.no_grad()
    def optim_step(self, lr: float) -> Stats:
        """Clip, step, zero the gradients; see `Engine.optim_step`."""
        optimizer = trained(self._optimizer)
        self._reshard()  # what a forward pass after the last backward has gathered would stay as it was
        gradients = optimizer.gradients()
        if self.mesh.tensor is not None:
            uncut = [gradient for name, gradient in gradients.items() if name not in self._cuts]
            sum_over(self.mesh.tensor, uncut)
        norm = float(self._gradient_norm(gradients))
        if math.isfinite(norm):
            scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            if scale < 1.0:
                torch._foreach_mul_(list(gradients.values()), scale)
            optimizer.step(lr)
        optimizer.zero_grad()
        self.skipped_in_a_row = skipped_in_a_row(
            self.skipped_in_a_row, norm, self._config.max_skipped_steps
        )
        return optimizer_stats(norm, lr)

    def shards(self, what: Part) -> Iterator[Shard]:
        """This rank's pieces of the weights, or of the optimizer's slots."""
        if what is Part.WEIGHTS:
            yield from model_shards(self._scorer.model, parts=self._regions)
            return
        if what is Part.FROZEN:
            parts = self._adapter.base if self._adapter else ()
            yield from model_shards(self._scorer.model, parts=parts)
            return
        yield from trained(self._optimizer).shards()

    def published(self) -> Publication:
        """This rank's pieces of the model; see `Engine.published`."""
        if self._adapter is not None and self._merges:
            return Publication(self._adapter.merged(self.layout))
        return Publication(self.shards(Part.WEIGHTS), self.shards(Part.FROZEN))

    def load(self, source: ShardSource, what: Part) -> None:
        """Fill this rank's pieces from `source`."""
        source.fill(self.shards(what))

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Weights, gradients and slots are in host memory inside the block; see `Engine.parked`."""
        self._reshard()
        parameters = list(self._scorer.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        if self._optimizer is not None:
            tensors += [t for held in self._optimizer.slots().values() for t in held.values()]
        with parked(map(local, tensors), self.arena, self._device, self.layout):
            yield

    def _reshard(self) -> None:
        """Let go of gathered weights."""
        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def close(self) -> None:
        """Free the model and the optimizer."""
        del self._scorer, self._optimizer, self._adapter, self._offload

    def _planned(self, micro: MicroBatch) -> ScoringPlan:
        """Return the scoring plan of a micro-batch that is on the host, where planning needs no wait."""
        return ScoringPlan.of(
            micro.input_ids, micro.cu_seqlens, micro.loss_mask, self._device, self._division
        )

    def _score(
        self,
        micro: MicroBatch,
        plan: ScoringPlan,
        *,
        record: bool = False,
        factors: Tensor | None = None,
    ) -> TokenOutputs:
        """Log-probs of a micro-batch; with `record` the outputs have the experts, with `factors` the load-balancing loss."""
        if micro.experts is not None:
            self._scorer.routers.require_fitting(micro.experts, len(micro.input_ids))
        routing = routing_of(
            micro,
            plan.rows,
            self._device,
            record=record,
            factors=factors,
            tensor=self.layout.tensor,
        )
        output: TokenOutputs = self._scorer(plan, micro.temperature, routing)
        if routing is None:
            return output
        return replace(
            output,
            experts=plan.rows.tokens_of(routing.record()) if record else output.experts,
            router_loss=output.router_loss if factors is None else routing.loss(),
        )

    def _reduce_in_next_backward(self, *, last: bool) -> None:
        """Set whether the next backward pass reduces gradients: in the last micro-batch, or in every one over the shards."""
        root = cast(FSDPModule, self._scorer)
        sharded = self.mesh.weights["shard"].size() > 1
        reduces = last or (sharded and self._config.reduce_each_microbatch)
        root.set_requires_gradient_sync(reduces)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(reduces)  # frees what was sent

    def _evened(self, batch: Batch) -> tuple[Batch, Tensor | None, Stats]:
        """Return the batch with experts, the cost of their probabilities and their load; the batch alone without a router loss."""
        weight, routers, known = self._config.router_aux_loss, self._scorer.routers, batch.is_routed
        if weight == 0:
            return batch, None, Stats()
        if not known:
            batch = batch.with_experts(self.forward(batch, experts=True))
        load = ExpertLoad.of(batch, routers.count, routers.experts, self.layout, self._device)
        return batch, load.factors(weight, routers.chosen), load.stats()

    def _gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Global 2-norm, fp32 scalar; the ranks of one copy of the model hold all of it."""
        shard, tensor = self.mesh.weights["shard"].get_group(), self.mesh.tensor
        if tensor is None:
            return norm_over([shard], gradients.values(), self._device)
        own = [g for name, g in gradients.items() if name in self._cuts or tensor.rank() == 0]
        return norm_over([shard, tensor], own, self._device)
