"""The PyTorch engine: FSDP2 (HSDP with several copies), Ulysses, tensor and expert parallelism on one or more processes.

Main weights and optimizer slots are fp32; compute is bf16 or fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication, Shard, ShardSource
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.layout import Layout, require_divisible
from burnish.distributed.processes import Mesh
from burnish.engines.base import Engine, LossFn, Part, compute_dtype
from burnish.engines.optim.optimizer import ShardedOptimizer, break_ties, local
from burnish.engines.sharded_engine import ShardedEngine, trained
from burnish.engines.torch.parallelize import global_norm, parallelize
from burnish.models.meta_init import build_on_meta, materialize, model_sizes
from burnish.models.names import model_shards, regions
from burnish.models.scorer import Scorer, ScoringPlan
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.records.seeds import derive_seed
from burnish.tracking.stats import Stats


def has_liger(device: torch.device) -> bool:
    """Return whether Liger's kernels are used: on CUDA, where liger-kernel is installed."""
    return device.type == "cuda" and find_spec("liger_kernel") is not None


class TorchEngine(ShardedEngine):
    """A model trained with FSDP2; implements `burnish.engines.base.Engine`.

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
        train: Sequence[str] = (),
    ) -> None:
        """See `Engine`. Another torch engine `beside` has the same layout."""
        layout = replace(layout, sequence=config.sequence_parallel, tensor=config.tensor_parallel)
        shared = beside.mesh if isinstance(beside, TorchEngine) else None
        self.mesh: Mesh = shared or Mesh.of(layout, config.replicas, device, config.expert_parallel)
        """The engine's process groups and host memory."""
        super().__init__(hf_config, config, layout, device, self.mesh.arena)
        self._sharing = self.mesh.sequence, layout.tensor
        model = build_on_meta(hf_config)
        if train:
            from burnish.models.freezing import freeze

            freeze(model, train)
        if optim is None and lora is None:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(compute_dtype(config))
        if not config.compile and has_liger(device):
            from burnish.models.kernels.liger import liger_kernels, use_kernels

            use_kernels(model, liger_kernels())
        self._adapter = None
        if lora is not None:
            from burnish.models.lora.adapter import Adapter

            self._adapter = Adapter(model, lora, compute_dtype(config))
            if lora.quantize_base != "none":
                from burnish.models.lora.quantized_base import quantize_layers

                quantize_layers(model, hf_config, lora)
        self._is_quantized = lora is not None and lora.quantize_base != "none"
        self._merges = lora is not None and lora.publish == "merged"
        self._scorer = Scorer(model, config.logprob_rows(hf_config.get_text_config().vocab_size))
        if optim is None:
            self._scorer.requires_grad_(False)
        self._moving: Callable[[], AbstractContextManager[None]] = nullcontext
        around = None
        if config.activation_offload and optim is not None:
            from burnish.engines.torch.activation_offload import ActivationOffload

            offload = ActivationOffload(self.arena, device)
            self._moving = offload.forward_and_backward
            around = offload.around
        self._regions = () if self._adapter else regions(model)
        self._cuts, other_cuts = parallelize(self._scorer, config, self.mesh, layout, around)
        self._rows = self._scorer.rows
        materialize(self._scorer, device, on_host=config.parameter_offload)
        if self._adapter is not None:
            self._adapter.cut(self._cuts, other_cuts)
            self._regions = self._adapter.weights
        elif self._cuts or other_cuts:
            from burnish.models.parts import cut_regions

            self._regions = cut_regions(cut_regions(self._regions, self._cuts), other_cuts)
        self._optimizer: ShardedOptimizer | None = None
        if optim is not None:
            arena = self.arena if config.optimizer_offload else None
            self._optimizer = ShardedOptimizer(model, self._regions, optim, layout, arena)

    @staticmethod
    def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
        """See `Engine.require_fitting`. Raises `IncompatibleError` for a model that tensor or expert parallelism cannot cut."""
        require_divisible(model_sizes(hf_config), config)
        if config.tensor_parallel > 1:
            from burnish.engines.torch.tensor_parallel import layer_cuts

            layer_cuts(build_on_meta(hf_config), 0, config.tensor_parallel)
        if config.expert_parallel > 1:
            from burnish.engines.torch.expert_parallel import require_shareable

            require_shareable(build_on_meta(hf_config))

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """See `Engine.forward_backward`."""
        trained(self._optimizer)
        batch, factors, of_experts = self._balanced(batch)
        self._scorer.train()
        stats, (total, aux) = Stats(), torch.zeros(2, dtype=torch.float32, device=self._device)
        last = len(batch.microbatches) - 1
        for index, (micro, is_filler) in enumerate(
            zip(batch.microbatches, batch.is_filler, strict=True)
        ):
            # Gradients are sums, so ranks may add them up after every micro-batch or once. The first frees memory, the second
            # sends less (engine.reduce_each_microbatch).
            self._reduce_in_next_backward(last=index == last)
            with self._moving():
                plan = self._plan(micro, loss)
                if self._adapter is not None:
                    seed = derive_seed(batch.seed, "dropout", self.steps)
                    self._adapter.begin_pass(plan, micro.input_ids, seed)
                balance = None if is_filler else factors
                counts = self._bias_updates is not None and not is_filler
                routing = self._routing(micro, plan, balance, record=counts)
                outputs = self._scorer(plan, micro.temperature, routing, micro.probe)
                value, of_micro = loss(outputs, micro.to(self._device))
                value.backward()  # type: ignore[no-untyped-call]
            # On the device: a number that Python reads would wait for all work that is queued.
            total += value.detach()
            if balance is not None:
                # Ranks that share a micro-batch have its whole loss, but their own rows' router loss. `reduce_stats` divides both.
                aux += routing.loss() * self.layout.sharing
            if counts:
                self._bias_updates.count(routing)
            stats = stats.merge(of_micro)
            self.passed += plan.passed
        return Stats(self._reduced(stats, total, aux, self.layout) | of_experts)

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """See `Engine.forward`."""
        self._require_routers(batch, record=experts)
        self._scorer.eval()
        with nullcontext() if adapter or self._adapter is None else self._adapter.off():
            return [self._score(micro, record=experts) for micro in batch.microbatches]

    @torch.no_grad()
    def optim_step(self, lr: float) -> Stats:
        """See `Engine.optim_step`."""
        optimizer = trained(self._optimizer)
        self._reshard()  # weights that a forward pass has gathered since the last backward would keep old values
        gradients = optimizer.gradients()
        if self._rows is not None:
            self._rows.sum_copies(self._scorer.model.get_input_embeddings().weight.grad)
        if self.mesh.tensor is not None:
            from burnish.engines.torch.tensor_parallel import sum_over

            uncut = [gradient for name, gradient in gradients.items() if name not in self._cuts]
            sum_over(self.mesh.tensor, uncut)
        # One norm over all ranks and tensors. Every rank reads the same number, so all step or all skip. A skipped step leaves the
        # weights and the optimizer's averages as they were; one NaN in the averages would stay for ever.
        norm = global_norm(gradients, self._cuts, self.mesh, self._device)
        if math.isfinite(norm):
            # The formula of torch.nn.utils.clip_grad_norm_, which does not know tensor parallelism's cuts.
            scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            if scale < 1.0:
                torch._foreach_mul_(list(gradients.values()), scale)
            optimizer.step(lr)
            if compute_dtype(self._config) is torch.bfloat16:
                break_ties(optimizer.weights())
        optimizer.zero_grad()
        return self._stepped(norm, lr)

    def shards(self, what: Part) -> Iterator[Shard]:
        """See `Engine.shards`."""
        if what is Part.WEIGHTS:
            yield from model_shards(self._scorer.model, parts=self._regions)
        elif what is Part.FROZEN and self._adapter is not None and self._is_quantized:
            from burnish.models.lora import quantized_base

            yield from quantized_base.base_shards(self._scorer.model, self._adapter.base)
        elif what is Part.FROZEN:
            parts = self._adapter.base if self._adapter else ()
            yield from model_shards(self._scorer.model, parts=parts)
        else:
            yield from trained(self._optimizer).shards()

    def published(self) -> Publication:
        """See `Engine.published`."""
        if self._adapter is not None and self._merges:
            return Publication(self._adapter.merged(self.layout))
        return Publication(self.shards(Part.WEIGHTS), self.shards(Part.FROZEN))

    def load(self, source: ShardSource, what: Part) -> None:
        """See `Engine.load`."""
        if what is Part.FROZEN and self._adapter is not None and self._is_quantized:
            from burnish.models.lora import quantized_base

            quantized_base.fill_base(self._scorer.model, self._adapter.base, source)
        else:
            source.fill(self.shards(what))

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """See `Engine.offloaded`."""
        self._reshard()
        parameters = list(self._scorer.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        if self._optimizer is not None:
            tensors += [t for held in self._optimizer.slots().values() for t in held.values()]
        from burnish.engines.offload import offloaded

        with offloaded(map(local, tensors), self.arena, self._device, self.layout):
            yield

    def _reshard(self) -> None:
        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def close(self) -> None:
        """See `Engine.close`."""
        del self._scorer, self._optimizer, self._adapter, self._moving

    def _score(self, micro: MicroBatch, *, record: bool) -> TokenOutputs:
        plan = self._plan(micro)
        routing = self._routing(micro, plan, None, record=record)
        output: TokenOutputs = self._scorer(plan, micro.temperature, routing, micro.probe)
        if not record:
            return output
        from burnish.models.routing import tokens_of

        return replace(output, experts=tokens_of(plan, routing.record()))

    def _router_biases(self) -> Iterable[tuple[int, Tensor]]:
        from burnish.engines.expert_load import biases_of

        return biases_of(self._scorer.model)

    def _part(self, plan: ScoringPlan) -> tuple[slice, int]:
        return slice(None), self.layout.tensor

    def _reduce_in_next_backward(self, *, last: bool) -> None:
        root = cast(FSDPModule, self._scorer)
        sharded = self.mesh.weights["shard"].size() > 1
        reduces = last or (sharded and self._config.reduce_each_microbatch)
        root.set_requires_gradient_sync(reduces)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(reduces)  # frees the buffers of reduced gradients
