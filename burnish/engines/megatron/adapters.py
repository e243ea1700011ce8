"""Low-rank adapters (LoRA) beside Megatron's linear layers and experts, with the tensors of PEFT's file.

A weight may hold several matrices of the checkpoint, such as q, k and v. Each has an A and a B of its own. Here one A holds all of
them, and B has the weight's rows, in their order. So tensor ranks cut A or B as they cut the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from burnish.boxes.box import Box, whole
from burnish.config.schema import LoraConfig
from burnish.engines.megatron.distributed_optimizer import checkpoint_regions
from burnish.engines.megatron.model import PackedGPT
from burnish.engines.megatron.modules import GroupedLinear, PlainRouter, grouped_linear
from burnish.errors import IncompatibleError, few
from burnish.models.heads import has_value_head
from burnish.models.lora.adapter import Adapter, LowRankDelta
from burnish.models.lora.adapter_config import factor_name, kinds_of
from burnish.models.meta_init import build_on_meta, model_sizes
from burnish.models.names import Region
from burnish.models.value_head import value_head_name

_RANK_MULTIPLE = 8
"""Grouped products need rows of a multiple of 16 bytes: 8 elements of 2 bytes."""


class StageAdapters:
    """An adapter on the stages of this rank, whose other parameters are frozen. Call inside `megatron_called`."""

    def __init__(
        self, stages: Sequence[PackedGPT], lora: LoraConfig, hf_config: PretrainedConfig
    ) -> None:
        """Add uninitialized fp32 factors. Raises `IncompatibleError` for what is adapted on the torch engine alone."""
        self.whole = Adapter(build_on_meta(hf_config), lora)
        """The adapter of the whole model, without values: its tensors, and the tensors of the checkpoint that it changes."""
        _require_plain(lora, self.whole, hf_config)
        self.regions: dict[nn.Parameter, tuple[Region, ...]] = {}
        """By trained parameter: the tensors of PEFT's file in it."""
        self._factors: list[Factors] = []
        trained_whole = {ours: peft for peft, ours in self.whole.originals.items()}
        sizes = model_sizes(hf_config)
        for stage in stages:
            weights = {
                name: (parameter, checkpoint_regions(name, parameter.shape, stage, sizes))
                for name, parameter in stage.named_parameters()
            }
            for name, (parameter, regions) in weights.items():
                renamed = [_renamed(r, trained_whole) for r in regions if r.name in trained_whole]
                parameter.requires_grad_(bool(renamed))
                if renamed:
                    self.regions[parameter] = tuple(renamed)
                if any(region.name in self.whole.changes for region in regions):
                    self._adapt(stage, name, regions, sizes)

    def _adapt(self, stage: PackedGPT, name: str, regions: Sequence[Region], sizes: Any) -> None:
        owner, _, kind = name.rpartition(".")
        layer = stage.get_submodule(owner)
        groups = stage.pg_collection
        factors: Factors
        if isinstance(layer, GroupedLinear):
            factors = ExpertFactors(layer, regions, self.whole, groups)
        elif kind == "weight" and isinstance(layer, nn.Linear | PlainRouter):  # whole on each rank
            layers = _layers_of(regions, self.whole.changes)
            factors = LinearFactors(stage, layer.weight, None, regions, layers, self.whole)
        elif kind == "weight" and (dim := _cut_dim(layer)) is not None:
            shape = list(layer.weight.shape)
            shape[dim] *= groups.tp.size()
            uncut = checkpoint_regions(name, (*shape,), stage, sizes, uncut=True)
            layers = _layers_of(uncut, self.whole.changes)
            factors = LinearFactors(stage, layer.weight, dim, regions, layers, self.whole)
        else:
            raise IncompatibleError(
                f"the Megatron engine computes no adapter of {few([r.name for r in regions])}",
                have=f"{few(kinds_of(r.name for r in regions))} in model.lora.targets",
                want="linear layers and experts whose ranks share the weights",
                do="name other layers in model.lora.targets, or set engine.kind=torch",
            )
        layer.add_module("lora", factors)
        if not isinstance(layer, PlainRouter):  # which adds to its logits
            layer.register_forward_hook(_add)
        self._factors.append(factors)
        self.regions |= {factors.a: factors.regions_of_a, factors.b: factors.regions_of_b}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute without the adapter inside the block."""
        for factors in self._factors:
            factors.scale = 0.0
        try:
            yield
        finally:
            for factors in self._factors:
                factors.scale = self.whole.scale


def _require_plain(lora: LoraConfig, adapter: Adapter, hf_config: PretrainedConfig) -> None:
    """Raise `IncompatibleError` for what is beside A and B, except for the head of a critic or a reward model."""
    head = value_head_name(adapter.model) if has_value_head(hf_config) else ""
    beside = [name for name in adapter.originals.values() if name.rpartition(".")[0] != head]
    if lora.dora or beside:
        raise IncompatibleError(
            "the Megatron engine trains no such adapter",
            have="DoRA" if lora.dora else f"{few(beside)} trained whole beside A and B",
            want="A and B alone",
            do="set engine.kind=torch, or start from another adapter",
        )


def _renamed(region: Region, names: Mapping[str, str]) -> Region:
    return Region(
        names[region.name], region.shape, region.parameter, region.box, region.dims, region.start
    )


def _cut_dim(layer: nn.Module) -> int | None:
    """Return the dim along which tensor ranks cut the weight of a linear layer of Megatron's or TransformerEngine's."""
    mode = getattr(layer, "parallel_mode", None)
    if isinstance(layer, ColumnParallelLinear) or mode == "column":
        return 0
    return 1 if isinstance(layer, RowParallelLinear) or mode == "row" else None


def _layers_of(regions: Sequence[Region], changes: Mapping[str, LowRankDelta]) -> list[str]:
    """Return PEFT's layers in a weight."""
    changed = [changes[region.name] for region in regions if region.name in changes]
    return list(dict.fromkeys(change.layer for change in changed))


class Factors(nn.Module):
    """A and B of one parameter of a layer."""

    a: nn.Parameter
    b: nn.Parameter
    regions_of_a: tuple[Region, ...]
    regions_of_b: tuple[Region, ...]
    scale: float
    """s; 0 turns the adapter off."""

    def added(self, output: Tensor, *args: Any) -> Tensor:
        """Return a layer's output plus what the adapter makes of its inputs."""
        return output if self.scale == 0.0 else torch.add(output, self(*args), alpha=self.scale)


def _add(layer: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Add the adapter's part to a layer's output: `Module.register_forward_hook`."""
    if not isinstance(output, tuple):
        return layer.lora.added(output, *args)
    return layer.lora.added(output[0], *args), *output[1:]


def _factor(*shape: int) -> nn.Parameter:
    """Make it in fp32, as the torch engine does; products are in the dtype of their inputs."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=torch.cuda.current_device()))


class LinearFactors(Factors):
    """A [layers · rank, in] and B [out, rank] of this rank's part of a linear layer.

    What is not cut has the gradient of all tokens on every rank: Megatron adds it up where ranks have different tokens.
    """

    def __init__(
        self,
        stage: PackedGPT,
        weight: Tensor,
        dim: int | None,
        regions: Sequence[Region],
        layers: Sequence[str],
        adapter: Adapter,
    ) -> None:
        """`layers` are those in the weight that tensor ranks cut along `dim`, `regions` the tensors in this rank's part of it."""
        super().__init__()
        self.scale = adapter.scale
        self._rank = rank = adapter.rank
        self._group = stage.pg_collection.tp
        self._dim = dim
        self._scatters = stage.config.sequence_parallel
        outputs, inputs = weight.shape
        self.a = _factor(len(layers) * rank, inputs)
        self.b = _factor(outputs, rank)
        for factor, cut_by in ((self.a, 1), (self.b, 0)):
            factor.tensor_model_parallel = dim == cut_by  # type: ignore[attr-defined]
            factor.sequence_parallel = self._scatters and dim != cut_by  # type: ignore[attr-defined]
        first_column = max(_start(region)[1] for region in regions)
        self.regions_of_a = tuple(
            Region(
                factor_name(name, "A"),
                adapter.shapes[factor_name(name, "A")],
                "",
                Box((number * rank, 0), (rank, inputs)),
                (0, 1),
                (0, first_column),
            )
            for number, name in enumerate(layers)
        )
        regions_of_b = []
        runs = []
        for region in regions:
            (row, _), (rows, _) = region.box.offsets, region.box.sizes
            change = adapter.changes.get(region.name)
            if change is None:
                continue
            runs.append((row, rows, layers.index(change.layer)))
            name = factor_name(change.layer, "B")
            start = change.row + _start(region)[0], 0
            box = Box((row, 0), (rows, rank))
            regions_of_b.append(Region(name, adapter.shapes[name], "", box, (0, 1), start))
        self.regions_of_b = tuple(regions_of_b)
        self._repeats, self._runs = _period(_gapless(runs, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return B A x of `inputs` [T, 1, in]: [T, 1, out], of the tokens that the layer gives."""
        narrow = functional.linear(inputs, self.a.to(inputs.dtype))
        if self._group.size() > 1 and self._dim is not None:
            narrow = self._exchanged(narrow)
        b = self.b.to(inputs.dtype).view(self._repeats, -1, self._rank)
        parts = []
        for row, rows, number in self._runs:
            own = b[:, row : row + rows].flatten(0, 1)
            if number is None:
                part = narrow.new_zeros(*narrow.shape[:-1], len(own))
            else:
                part = functional.linear(narrow.narrow(-1, number * self._rank, self._rank), own)
            parts.append(part.view(*part.shape[:-1], self._repeats, rows))
        return torch.cat(parts, dim=-1).flatten(-2)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        group = self._group
        if self._dim == 0:
            if self._scatters:
                return gather_from_sequence_parallel_region(narrow, group=group)
            return copy_to_tensor_model_parallel_region(narrow, group=group)
        if self._scatters:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=group)
        return reduce_from_tensor_model_parallel_region(narrow, group=group)


def _start(region: Region) -> tuple[int, ...]:
    return region.start or (0,) * len(region.dims)


_Run = tuple[int, int, int | None]
"""Rows of a weight that one layer's B computes: the first, their number, the layer's number."""


def _gapless(runs: Sequence[tuple[int, int, int]], rows: int) -> list[_Run]:
    """Return the runs in order, joined where a layer's follow each other, and those without an adapter."""
    joined: list[_Run] = []
    end = 0
    for start, count, number in [*sorted(runs), (rows, 0, -1)]:
        if start > end:
            joined.append((end, start - end, None))
        if joined and joined[-1][2] == number:
            first, before, _ = joined.pop()
            joined.append((first, before + count, number))
        elif count:
            joined.append((start, count, number))
        end = start + count
    return joined


def _period(runs: Sequence[_Run]) -> tuple[int, list[_Run]]:
    """Return how often the rows repeat the same runs, and those, such as q, k and v of each query group."""
    sizes = [run[1:] for run in runs]
    for length in range(1, len(runs) + 1):
        repeats, rest = divmod(len(runs), length)
        if not rest and sizes == sizes[:length] * repeats:
            return repeats, list(runs[:length])
    return 1, list(runs)


class ExpertFactors(Factors):
    """A [E · rank, in] and B [rank, out, E] of this rank's part of its experts, which PEFT gives one A and one B a layer.

    In PEFT's B [out, rank · E] experts alternate. A factor that is not cut is the same on the ranks that share an expert.
    """

    def __init__(
        self,
        layer: GroupedLinear,
        regions: Sequence[Region],
        adapter: Adapter,
        groups: ProcessGroupCollection,
    ) -> None:
        """`regions` are the tensors in the layer's weight [E, out, in]."""
        super().__init__()
        self.scale = adapter.scale
        self._group = groups.expt_tp
        experts, outputs, inputs = layer.weight.shape
        rank = adapter.rank
        of_first = [region for region in regions if region.box.offsets[0] == 0]
        changes = [adapter.changes.get(region.name) for region in of_first]
        layers = {change.layer if change else None for change in changes}
        change = changes[0]
        if change is None or len(layers) > 1 or change.experts == 1:
            raise IncompatibleError(
                "the Megatron engine adapts gate and up of experts together",
                have=few(sorted(str(layer) for layer in layers)),
                want="experts that transformers keeps in one parameter",
                do="take the experts out of model.lora.targets, or set engine.kind=torch",
            )
        self.a = _factor(experts * rank, inputs)
        self.b = _factor(rank, outputs, experts)
        a, b = (factor_name(change.layer, letter) for letter in "AB")
        (_, first_column), first = _start(of_first[0]), change.expert
        self._is_column = inputs == adapter.shapes[a][1]
        for factor in (self.a, self.b):
            factor.tensor_model_parallel = True  # type: ignore[attr-defined]
            factor.allreduce = False  # type: ignore[attr-defined]  # Megatron's mark of experts
        # Of a factor on several ranks the norm of gradients counts one.
        uncut = self.a if self._is_column else self.b
        uncut.shared = groups.expt_tp.rank() > 0  # type: ignore[attr-defined]
        in_a = whole((*self.a.shape,))
        start = first * rank, first_column
        self.regions_of_a = (Region(a, adapter.shapes[a], "", in_a, (0, 1), start),)
        self.regions_of_b = tuple(
            Region(
                b,
                adapter.shapes[b],
                "",
                Box((number, region.box.offsets[1], 0), (1, region.box.sizes[1], experts)),
                (1, 2),
                (own.row + _start(region)[0], number * own.experts + first),
            )
            for number in range(rank)
            for region, own in zip(of_first, changes, strict=True)
            if own is not None
        )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return B A x of `rows` [R, in], sorted by expert: [R, out]; `counts` [E] are the rows of each expert."""
        narrow = self.a.to(rows.dtype).view(-1, len(self.b), self.a.shape[1])
        wide = self.b.to(rows.dtype).permute(2, 1, 0)
        if rest := -len(self.b) % _RANK_MULTIPLE:
            narrow = functional.pad(narrow, (0, 0, 0, rest))
            wide = functional.pad(wide, (0, rest))
        wide = wide.contiguous()  # Megatron would lose the sum of another gradient
        # The gradient of a whole factor is the sum over parts of the layer.
        if self._group.size() > 1:
            if self._is_column:
                narrow = copy_to_tensor_model_parallel_region(narrow, group=self._group)
            else:
                wide = copy_to_tensor_model_parallel_region(wide, group=self._group)
        return grouped_linear(grouped_linear(rows, narrow, counts), wide, counts)
