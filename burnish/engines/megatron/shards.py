"""A Megatron model and its distributed optimizer on this rank, as shards.

The optimizer's fp32 weights are flat ranges of parameters, one per data-parallel rank. They and the moments are decomposed into
boxes of checkpoint tensors, each a view of Megatron's memory. Saving gathers nothing; after filling, Megatron's all-gather carries
the weights to the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from transformers import PretrainedConfig

from burnish.boxes.box import whole
from burnish.boxes.shards import Shard, ShardSource, TensorSpec
from burnish.engines.megatron.flat_ranges import boxes_in_range
from burnish.engines.optim.optimizer import SLOTS
from burnish.families import ModelSizes
from burnish.models.megatron_names import Seat, regions_of, stacked
from burnish.models.meta_init import model_sizes
from burnish.models.names import Region

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_EXPERTS = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d*)")
# A matrix of all experts that the rank has, or with TransformerEngine of the one with this number among them.


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """What the optimizer of this rank steps of one parameter."""

    parameter: str
    """Whose it is, by its name in the whole model."""
    start: int
    """Its first element, in C order of the parameter on this rank."""
    main: Tensor
    """The weights, fp32, flat: the optimizer's own, or a view of the parameter where that is fp32."""
    optimizer: torch.optim.Optimizer
    """What steps them, and holds their moments."""


class MegatronShards:
    """The pieces of a model that is cut into `chunks`, and of the optimizer's state."""

    def __init__(
        self,
        chunks: Sequence[Any],
        hf_config: PretrainedConfig,
        optimizers: Sequence[DistributedOptimizer],
    ) -> None:
        """Take this rank's stages as `chunks`, wrapped for data parallelism if there are `optimizers`.

        Raises `IncompatibleError` for parameters without a checkpoint name.
        """
        sizes = model_sizes(hf_config)
        self._chunks = list(chunks)
        self._parameters: dict[str, nn.Parameter] = {}
        self._regions: dict[str, tuple[Region, ...]] = {}
        for chunk in map(_unwrapped, self._chunks):
            for local, parameter in chunk.named_parameters():
                name, regions = _described(local, tuple(parameter.shape), chunk, sizes)
                self._parameters[name], self._regions[name] = parameter, regions
        self._optimizers = list(optimizers)
        self._ranges = list(self._stepped())

    def weights(self) -> Iterator[Shard]:
        """What is trained: the optimizer's fp32 weights. Without an optimizer the model's own."""
        if not self._optimizers:
            yield from self.model()
        for part in self._ranges:
            yield from self._pieces(part, part.main.detach())

    def slots(self) -> Iterator[Shard]:
        """The optimizer's moments, `exp_avg/<weight>` and so on, in the dtype in which they rest."""
        for slot in SLOTS:
            for part in self._ranges:
                state = part.optimizer.state[part.main]
                yield from self._pieces(part, state[slot], f"{slot}/")

    def model(self) -> Iterator[Shard]:
        """Return this rank's compute weights, in their dtype; others may hold the same."""
        for name, parameter in self._parameters.items():
            held, box = parameter.detach(), whole(tuple(parameter.shape))
            shards = (region.shard_of(held, box) for region in self._regions[name])
            yield from (shard for shard in shards if shard is not None)

    def fill(self, source: ShardSource) -> None:
        """Fill what is trained, and let the model's weights follow. Collective.

        Padding of the vocabulary becomes zero.
        """
        for name, parameter in self._parameters.items():
            if sum(region.box.elements for region in self._regions[name]) < parameter.numel():
                parameter.data.zero_()
                for part in self._ranges:
                    if part.parameter == name:
                        part.main.detach().zero_()
        source.fill(self.weights())
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self._chunks if self._optimizers else ():
            chunk.start_param_sync(force_sync=True)

    def _pieces(self, part: _Range, flat: Tensor, prefix: str = "") -> Iterator[Shard]:
        """A range's elements, or what lies beside them, as boxes of the checkpoint's tensors."""
        shape = tuple(self._parameters[part.parameter].shape)
        stop = part.start + part.main.numel()
        for region in self._regions[part.parameter]:
            spec = TensorSpec(prefix + region.name, region.shape, flat.dtype)
            for at, box in boxes_in_range(region, shape, part.start, stop):
                yield Shard(spec, box, flat[at : at + box.elements].view(box.sizes))

    def _stepped(self) -> Iterator[_Range]:
        """What this rank's optimizers step, in the order of the model's parameters."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        found: dict[str, _Range] = {}
        for optimizer in self._optimizers:
            for parameter, main in _main_weights(optimizer):
                start = optimizer._get_model_param_range_map(parameter)["param"].start
                name = names[id(parameter)]
                found[name] = _Range(name, start, main, optimizer.optimizer)
        yield from (found[name] for name in self._parameters if name in found)


def _main_weights(optimizer: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters of which this rank steps a range, with the range's fp32 weights."""
    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)


def _unwrapped(chunk: nn.Module) -> Any:
    """The GPTModel in what wraps it."""
    return get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)


def _seat(group: torch.distributed.ProcessGroup) -> Seat:
    return Seat(group.rank(), group.size())


def _described(
    name: str, shape: tuple[int, ...], chunk: Any, sizes: ModelSizes
) -> tuple[str, tuple[Region, ...]]:
    """A parameter's name with layers counted over all stages, and the checkpoint tensors in it."""
    seats = _seat(chunk.pg_collection.tp), _seat(chunk.pg_collection.expt_tp)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, regions_of(name, shape, sizes, *seats)
    module, rest = chunk.decoder.layers[int(layer[1])], layer[2]
    prefix = f"decoder.layers.{module.layer_number - 1}"
    name = f"{prefix}.{rest}"
    of_experts = _OF_EXPERTS.fullmatch(rest)
    if of_experts is None:
        return name, regions_of(name, shape, sizes, *seats)
    matrix, number = of_experts.groups()
    experts = module.mlp.local_expert_indices
    of_each = [f"{prefix}.mlp.experts.local_experts.{expert}.{matrix}" for expert in experts]
    if number:
        return name, regions_of(of_each[int(number)], shape, sizes, *seats)
    return name, stacked(regions_of(each, shape[1:], sizes, *seats) for each in of_each)
