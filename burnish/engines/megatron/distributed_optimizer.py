"""AdamW by Megatron's distributed optimizer, over gradients that its DDP accumulates, and perhaps Muon; weights and slots as shards.

Main weights, moments and accumulated gradients are fp32. Moments on the host (`engine.optimizer_offload`) or in bf16 (`optim.moments`)
come to the device in fp32 for their step.

Megatron lays parameters end to end and gives each data-parallel rank an equal run. So a rank's part of a parameter is a run of elements
in C order, decomposed into boxes of checkpoint tensors: for a matrix at most the end of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from transformers import PretrainedConfig

from burnish.boxes.box import Box, flat_range, flat_runs, whole
from burnish.boxes.shards import Shard, ShardSource, TensorSpec
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.collectives import agree
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.base import compute_dtype
from burnish.engines.megatron.gated_delta_net import GatedDeltaNet
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.model import PackedGPT
from burnish.engines.offload import step_in_waves
from burnish.engines.optim.muon import MOMENTUM, Muon, matrices_in
from burnish.engines.optim.optimizer import SLOTS, break_ties, moments_dtype
from burnish.engines.optim.slots import zero_slot
from burnish.families import ModelSizes
from burnish.models.megatron_names import MegatronSlot, regions_of, stacked, stacked_experts
from burnish.models.meta_init import model_sizes
from burnish.models.names import Region

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_ATTENTION = re.compile(r"self_attention\.(.+(?<!layer_norm_weight))")
# One parameter with the matrices of all the rank's experts. With TransformerEngine each expert has its own, which ends in a number.
_OF_EXPERTS = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d*)")

Adapted = Mapping[nn.Parameter, tuple[Region, ...]]
"""With an adapter: the parameters that are trained, and the tensors of PEFT's file in each."""


class MegatronOptimizer:
    """The optimizer of this rank's stages, for use inside `megatron_called`. Making it is collective."""

    def __init__(
        self,
        stages: Sequence[PackedGPT],
        hf_config: PretrainedConfig,
        config: EngineConfig,
        optim: OptimConfig,
        mesh: MegatronMesh,
        layout: Layout,
        adapted: Adapted | None = None,
    ) -> None:
        overlaps = config.megatron.overlaps(mesh.groups.dp_cp.size())
        self._reduces_early, self._gathers_late = overlaps
        self.chunks = [_wrapped(stage, mesh, *overlaps) for stage in stages]
        """The stages, wrapped with the buffers in which their gradients accumulate."""
        if self._reduces_early:
            # By these functions the schedules say which micro-batch is the last.
            waits = [chunk.no_sync for chunk in self.chunks]
            stages[0].config.no_sync_func = waits if len(waits) > 1 else waits[0]
        self._config = config
        self._optim = optim
        self._mesh = mesh
        self._chained = get_megatron_optimizer(
            _settings(config, optim),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.parts = [o for o in self._chained.chained_optimizers if not o.is_stub_optimizer]
        """The chained optimizers: one for experts and one for all other weights, if this rank has any."""
        self.shards = MegatronShards(self.chunks, hf_config, self.parts, adapted)
        """This rank's shards of the weights and the optimizer's slots."""
        arena = mesh.arena if config.optimizer_offload else None
        self._muon = self._make_muon(layout, arena) if optim.kind == "muon" else None
        with agree(layout):  # a rank may have no room in the arena
            dtype = moments_dtype(optim)
            for part in self.parts:
                prepare_slots(part.optimizer, arena, dtype)
        self._in_waves = config.optimizer_offload or dtype is not torch.float32
        self.steps = 0
        """Steps taken; `set_steps` sets it."""
        self.zero_grad()

    def _make_muon(self, layout: Layout, arena: Arena | None) -> Muon:
        matrices = matrices_in(self.shards.regions_in_layers())
        weights = {part.parameter: part.main.detach() for part in self.shards.ranges}
        muon = Muon(weights, matrices, self.shards.pieces, self._optim, layout, arena)
        for part in self.shards.ranges:
            if part.parameter in muon.weights:
                buffer = muon.slots[MOMENTUM][part.parameter]
                part.optimizer.state[part.main][MOMENTUM] = buffer
        return muon

    def set_steps(self, steps: int) -> None:
        """Set how many steps were taken, for Adam's bias correction."""
        self.steps = steps
        for part in self.parts:
            _set_steps(part.optimizer, steps)

    def begin_backward(self) -> None:
        """Prepare for gradients. Those of an earlier pass that ranks have added up stay with the rank that steps them. Collective."""
        if not self._reduces_early:
            return
        for group in self._bucket_groups():
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
                of_process = group.intra_distributed_optimizer_instance_rank
                for bucket in group.buckets:
                    shards = bucket.grad_data.chunk(group.intra_distributed_optimizer_instance_size)
                    for rank, shard in enumerate(shards):
                        if rank != of_process:
                            shard.zero_()
            group.reset()

    def wait(self) -> None:
        """Wait for the exchanges that have begun."""
        for group in self._bucket_groups():
            for handle in (group.grad_reduce_handle, group.param_gather_handle):
                if handle is not None:
                    handle.wait()

    def gather(self) -> None:
        """Make all weights of the model those of the last step; forward passes do so by themselves. Collective."""
        for group in self._bucket_groups() if self._gathers_late else ():
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _bucket_groups(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups

    def reduce(self) -> float:
        """Add the gradients up over all ranks, once a step; return their global 2-norm. Collective."""
        for group in self._bucket_groups() if self._reduces_early else ():
            if group.grad_reduce_handle is None:  # in the first step, or without a backward pass
                group.start_grad_sync()
        finalize_model_grads(self.chunks, None, pg_collection=self._mesh.groups)
        self._chained.prepare_grads()
        return float(self._chained.get_grad_norm())

    def step(self, lr: float, norm: float) -> None:
        """Clip reduced gradients by their `norm` and step, if it is finite; then zero them. Collective."""
        if math.isfinite(norm):
            for part in self.parts:
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(), self._config.max_grad_norm, norm
                )
            for group in self._chained.param_groups:
                group["lr"] = lr
                group["weight_decay"] = self._optim.weight_decay * group["wd_mult"]
            if self._muon is not None:
                self._muon.step(lr, self._taken_gradients(self._muon))
            if self._in_waves:
                for part in self.parts:
                    step_offloaded(part.optimizer, self.steps)
            self._chained.step_with_ready_grads()  # also copies the weights to the model
            if compute_dtype(self._config) is torch.bfloat16:
                for part in self.parts:
                    break_ties(part.get_parameters())
            self.steps += 1
        self.zero_grad()

    def _taken_gradients(self, muon: Muon) -> dict[str, Tensor]:
        """Return the gradients of Muon's weights by name. Adam does not see them any more, so it leaves these weights."""
        gradients = {}
        for part in self.shards.ranges:
            if part.parameter in muon.weights and part.main.grad is not None:
                gradients[part.parameter] = part.main.grad
                part.main.grad = None
        return gradients

    def zero_grad(self) -> None:
        """Make all gradients zero; their buffers stay."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._chained.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        """Yield gradients, main weights, moments."""
        for chunk in self.chunks:
            yield from (each.main_grad for each in filter(_is_trained, chunk.parameters()))
        for part in self.parts:
            yield from part.get_parameters()
            for state in part.optimizer.state.values():
                yield from (held for held in state.values() if isinstance(held, Tensor))


def _wrapped(
    stage: PackedGPT, mesh: MegatronMesh, reduces_early: bool, gathers_late: bool
) -> DistributedDataParallel:
    """Give a stage buffers for its gradients. Exchanges of gradients and weights may overlap with passes.

    Megatron copies the weights. So the unloaded weights are freed first, by expanding one element.
    """
    for parameter in filter(_is_trained, stage.parameters()):
        element = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
        parameter.data = element.expand(parameter.shape)
    return DistributedDataParallel(
        config=stage.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=reduces_early,
            overlap_param_gather=gathers_late,
        ),
        module=stage,
        pg_collection=mesh.groups,
    )


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _settings(config: EngineConfig, optim: OptimConfig) -> OptimizerConfig:
    dtype = compute_dtype(config)
    return OptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=True,
        lr=0.0,  # `step` sets it
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
    """Make zero moments of Adam's weights, so that they can be loaded and saved before the first step.

    `optimizer` is torch's AdamW, or a fused one of TransformerEngine or Apex.
    """
    for weight in _weights_of(optimizer):
        optimizer.state[weight] |= {slot: zero_slot(weight.data, arena, dtype) for slot in SLOTS}
    _set_steps(optimizer, 0)


def step_offloaded(optimizer: Any, steps: int) -> None:
    """Step every weight of Adam, with offloaded moments; drop the gradients."""
    weights = list(_weights_of(optimizer))
    gradients = [(weight, weight.grad) for weight in weights]
    for weight in weights:
        weight.grad = None
    step_in_waves(optimizer, gradients, SLOTS, steps)


def _set_steps(optimizer: Any, steps: int) -> None:
    """Set an optimizer's count: torch's AdamW has one per weight, fused ones one per group."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, torch.optim.AdamW):
            group["step"] = steps
            continue
        on_device = group["fused"] or group["capturable"]
        for weight in _adams(optimizer, group):
            device = weight.device if on_device else None
            count = torch.tensor(float(steps), dtype=torch.float32, device=device)
            optimizer.state[weight]["step"] = count


def _weights_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from _adams(optimizer, group)


def _adams(optimizer: Any, group: Any) -> Iterator[Tensor]:
    """Yield the weights of a group that Adam steps: Muon's have another state from the start."""
    for weight in group["params"]:
        state = optimizer.state[weight]
        if not state or SLOTS[0] in state:
            yield weight


@dataclass(frozen=True, slots=True, eq=False)
class SteppedRange:
    """The part of one parameter that this rank's optimizer steps."""

    parameter: str
    """The parameter's name in the whole model."""
    start: int
    """The range's first element, in C order of the parameter on this rank."""
    main: Tensor
    """The range's flat fp32 weights: the optimizer's copy, or a view of the parameter if that is fp32."""
    optimizer: torch.optim.Optimizer
    """The optimizer that steps these weights and holds their moments."""


class MegatronShards:
    """This rank's shards of a model and its optimizer's state."""

    def __init__(
        self,
        chunks: Sequence[Any],
        hf_config: PretrainedConfig,
        optimizers: Sequence[DistributedOptimizer],
        adapted: Adapted | None = None,
    ) -> None:
        """Take this rank's stages, wrapped for data parallelism if there are `optimizers`.

        Raises `IncompatibleError` for parameters without a checkpoint name.
        """
        sizes = model_sizes(hf_config)
        self._chunks = list(chunks)
        self._parameters: dict[str, nn.Parameter] = {}
        self._fixed: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        self._regions: dict[str, tuple[Region, ...]] = {}
        self._copies: dict[str, tuple[Region, ...]] = {}
        for chunk in self._chunks:
            model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            for local, parameter in model.named_parameters():
                name = _name_in_model(local, model)
                if adapted is not None and parameter in adapted:
                    self._regions[name] = adapted[parameter]
                else:
                    shape = tuple(parameter.shape)
                    self._regions[name] = checkpoint_regions(local, shape, model, sizes)
                if adapted is None or parameter in adapted:
                    self._parameters[name] = parameter
                else:
                    self._fixed[name] = parameter
            for local, buffer in _saved_buffers(model):
                name = _name_in_model(local, model)
                self._regions[name] = checkpoint_regions(local, (*buffer.shape,), model, sizes)
                buffers[name] = buffer
            self._copies |= _copies(model, self._regions)
        self._buffers = buffers if adapted is None else {}
        self._fixed |= {} if adapted is None else buffers
        self._optimizers = list(optimizers)
        self.ranges = list(self._stepped())
        """The parts of this rank's parameters that its optimizers step."""

    def weights(self) -> Iterator[Shard]:
        """Yield the trained weights: the optimizer's in fp32, without one the model's own. Buffers are as they are.

        What a checkpoint holds twice comes twice.
        """
        yield from self._once()
        for part in self.ranges:
            if part.parameter in self._copies:
                regions = self._copies[part.parameter]
                yield from self._pieces(part, part.main.detach(), regions=regions)

    def _once(self) -> Iterator[Shard]:
        if not self._optimizers:
            yield from self.model()
            return
        for part in self.ranges:
            yield from self._pieces(part, part.main.detach())
        yield from self._whole(self._buffers)

    def frozen(self) -> Iterator[Shard]:
        """Yield this rank's weights under an adapter; other ranks may hold the same."""
        yield from self._whole(self._fixed)

    def slots(self) -> Iterator[Shard]:
        """Yield the optimizer's slots, `exp_avg/<weight>` and so on, in the dtype between steps."""
        states = {part.parameter: part.optimizer.state[part.main] for part in self.ranges}
        for slot in (*SLOTS, MOMENTUM):
            tensors = {name: state[slot] for name, state in states.items() if slot in state}
            yield from self.pieces(tensors, f"{slot}/")

    def pieces(self, tensors: Mapping[str, Tensor], prefix: str = "") -> Iterator[Shard]:
        """Yield the pieces of checkpoint tensors in flat tensors, each of a parameter's range on this rank. `prefix` precedes the names."""
        for part in self.ranges:
            if part.parameter in tensors:
                yield from self._pieces(part, tensors[part.parameter], prefix)

    def regions_in_layers(self) -> dict[str, tuple[Region, ...]]:
        """Return the checkpoint tensors in each parameter of this rank's decoder layers."""
        return {name: self._regions[name] for name in self._parameters if _LAYER.fullmatch(name)}

    def model(self) -> Iterator[Shard]:
        """Yield this rank's weights in the compute dtype; other ranks may hold the same."""
        yield from self._whole(self._parameters)
        yield from self._whole(self._buffers)

    def _whole(self, tensors: Mapping[str, Tensor]) -> Iterator[Shard]:
        for name, tensor in tensors.items():
            held = tensor.detach()
            box = whole(tuple(tensor.shape))
            shards = (region.shard_of(held, box) for region in self._regions[name])
            yield from (shard for shard in shards if shard is not None)

    def fill(self, source: ShardSource) -> None:
        """Fill the trained weights, and copy them to the model. Zero the vocabulary's padding. Collective."""
        for name in self._without_padding(self._parameters):
            for part in self.ranges:
                if part.parameter == name:
                    part.main.detach().zero_()
        source.fill(self._once())
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self._chunks if self._optimizers else ():
            chunk.start_param_sync(force_sync=True)

    def fill_frozen(self, source: ShardSource) -> None:
        """Fill the weights under an adapter."""
        self._without_padding(self._fixed)
        source.fill(self.frozen())

    def _without_padding(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Zero the tensors that have elements of no tensor of a checkpoint; return their names."""
        padded = [
            name
            for name, tensor in tensors.items()
            if sum(region.box.elements for region in self._regions[name]) < tensor.numel()
        ]
        for name in padded:
            tensors[name].data.zero_()
        return padded

    def _pieces(
        self,
        part: SteppedRange,
        flat: Tensor,
        prefix: str = "",
        regions: Sequence[Region] | None = None,
    ) -> Iterator[Shard]:
        shape = tuple(self._parameters[part.parameter].shape)
        stop = part.start + part.main.numel()
        for region in self._regions[part.parameter] if regions is None else regions:
            spec = TensorSpec(prefix + region.name, region.shape, flat.dtype)
            for at, box in boxes_in_range(region, shape, part.start, stop):
                yield Shard(spec, box, flat[at : at + box.elements].view(box.sizes))

    def _stepped(self) -> Iterator[SteppedRange]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        ranges: dict[str, SteppedRange] = {}
        for optimizer in self._optimizers:
            for parameter, main in _main_weights(optimizer):
                start = optimizer._get_model_param_range_map(parameter)["param"].start
                name = names[id(parameter)]
                ranges[name] = SteppedRange(name, start, main, optimizer.optimizer)
        yield from (ranges[name] for name in self._parameters if name in ranges)


def _copies(stage: Any, regions: Mapping[str, tuple[Region, ...]]) -> dict[str, tuple[Region, ...]]:
    """Return the tensors by which a checkpoint's MTP layer repeats what is in parameters, whose own are `regions`."""
    if stage.multi_token is None:
        return {}
    copies = stage.multi_token.names.copies
    return {
        name: tuple(
            replace(region, name=copy)
            for region in held
            for copy, of in copies.items()
            if of == region.name
        )
        for name, held in regions.items()
    }


def _main_weights(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of which this rank steps a range, and the range's fp32 weights."""
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def checkpoint_regions(
    name: str, shape: tuple[int, ...], stage: Any, sizes: ModelSizes, *, uncut: bool = False
) -> tuple[Region, ...]:
    """Return the tensors of the checkpoint in a stage's parameter of this `shape`, which is the whole one's if it is `uncut`."""
    groups = stage.pg_collection
    seats = [MegatronSlot(group.rank(), group.size()) for group in (groups.tp, groups.expt_tp)]
    if uncut:
        seats = [MegatronSlot(), MegatronSlot()]
    if name.startswith("multi_token."):
        mtp = stage.multi_token
        if there := mtp.outside(name):
            box = whole(shape)
            return (Region(there, shape, name, box, tuple(range(len(shape)))),)
        regions = _regions_in_layer(mtp.in_model(name), shape, mtp.layer, sizes, seats)
        return tuple(mtp.renamed(region, name) for region in regions)
    name = _name_in_model(name, stage)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return regions_of(name, shape, sizes, *seats)
    module = next(each for each in stage.decoder.layers if each.layer_number == int(layer[1]) + 1)
    return _regions_in_layer(name, shape, module, sizes, seats)


def _regions_in_layer(
    name: str, shape: tuple[int, ...], module: Any, sizes: ModelSizes, seats: list[MegatronSlot]
) -> tuple[Region, ...]:
    """Return the tensors in a parameter of the decoder layer `module`; `name` is that in the whole model."""
    layer = _LAYER.fullmatch(name)
    assert layer is not None
    of_attention = _OF_ATTENTION.fullmatch(layer[2])
    if of_attention is not None and isinstance(module.self_attention, GatedDeltaNet):
        return tuple(module.self_attention.regions(of_attention[1], name, shape, seats[0]))
    of_experts = _OF_EXPERTS.fullmatch(layer[2])
    if of_experts is None:
        return regions_of(name, shape, sizes, *seats)
    matrix, number = of_experts.groups()
    prefix = f"decoder.layers.{layer[1]}"
    experts = module.mlp.local_expert_indices
    if sizes.family.stacks_experts:
        return stacked_experts(name, shape, experts[0], sizes, seats[1])
    of_each = [f"{prefix}.mlp.experts.local_experts.{expert}.{matrix}" for expert in experts]
    if number:
        return regions_of(of_each[int(number)], shape, sizes, *seats)
    return stacked(regions_of(each, shape[1:], sizes, *seats) for each in of_each)


def _name_in_model(name: str, stage: Any) -> str:
    """Return the name over all stages of a stage's parameter."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    return f"decoder.layers.{stage.decoder.layers[int(layer[1])].layer_number - 1}.{layer[2]}"


def boxes_in_range(
    region: Region, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of a region in the flat range `start:stop` of its parameter of this `shape`.

    Each comes with the offset of its contiguous elements in the range.
    """
    passed = 0  # elements of the region before the run
    for first, count in flat_runs(shape, region.box):
        begin = max(start, first)
        end = min(stop, first + count)
        if begin < end:
            done = begin - start
            inside = passed - first
            for box in flat_range(region.box.sizes, begin + inside, end + inside):
                yield done, region.in_tensor(box)
                done += box.elements
        passed += count
