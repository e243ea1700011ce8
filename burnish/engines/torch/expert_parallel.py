"""Expert parallelism: neighbouring ranks share the experts of every layer (GShard, arXiv 2006.16668).

Each of P ranks holds E / P experts whole, sharded by FSDP2 over the ranks that hold the same ones. A layer sends each token to the
ranks of its experts, by all-to-all, and their outputs back. Routers and all other weights stay as without it.

The ranks of a group have different tokens, so an expert sees those of all of them, and its gradient is the sum over all. Numbers of rows are
read by the host once per layer and pass: without padding nothing else knows how much memory the rows need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from burnish.distributed.device import uncompiled
from burnish.distributed.tensor_collectives import exchange_rows
from burnish.errors import IncompatibleError, few
from burnish.models.kernels.expert_rows import RowOrder, has_experts
from burnish.models.lora.adapter_config import plain_names
from burnish.models.parts import ShardRule, keep_parts

_WRAPPED = re.compile(r"(\.base_layer)+$")


def share_experts(
    model: nn.Module, group: ProcessGroup
) -> tuple[dict[str, ShardRule], list[nn.Module]]:
    """Keep this rank's experts in `model` (on meta). Return the cuts by parameter, and the modules of experts.

    Raises `IncompatibleError` as `require_shareable` does.
    """
    require_shareable(model)
    cuts: dict[str, ShardRule] = {}
    modules = []
    names = plain_names(model)
    for name, experts in _experts_in(model):
        outer = _WRAPPED.sub("", name)
        count = int(experts.num_experts)
        of_rank = group.rank(), group.size()
        for own, parameter in model.get_submodule(outer).named_parameters(outer):
            # An adapter's B [out, rank · E] has the experts in turn for each of its columns.
            takes_turns = names[own][1] == "B"
            joined = parameter.shape[1] // count if takes_turns else 1
            size = parameter.shape[int(takes_turns)]
            cuts[own] = ShardRule.of(size, int(takes_turns), *of_rank, joined)
        experts.num_experts = count // group.size()
        modules.append(model.get_submodule(outer))
    keep_parts(model, cuts)
    for module in modules:
        exchange = _Exchange(group)
        module.register_forward_pre_hook(exchange.send, with_kwargs=True)
        module.register_forward_hook(exchange.send_back)
    return cuts, modules


def require_shareable(model: nn.Module) -> None:
    """Raise `IncompatibleError` if a layer's experts are not one module of transformers with a row per expert."""
    of_layers = list(_experts_in(model))
    kind = getattr(getattr(model, "config", None), "model_type", "unknown")
    strange = [
        f"{name}.{own}"
        for name, experts in of_layers
        for own, parameter in experts.named_parameters(recurse=False)
        if len(parameter) != experts.num_experts
    ]
    if strange or not of_layers:
        raise IncompatibleError(
            f"the experts of models of type {kind} cannot be divided among processes",
            have=few(strange)
            if strange
            else "no layer whose experts transformers computes together",
            want="parameters with a row for each expert",
            do="set engine.expert_parallel=1",
        )


def gather_ahead(layers: Sequence[nn.Module], experts: Sequence[nn.Module]) -> None:
    """Have FSDP2 gather the next layer while one runs, in both passes.

    By itself it gathers when a module begins. That would be late, because the host waits inside layers.
    """
    of_layer = [[layer, *(e for e in experts if e in set(layer.modules()))] for layer in layers]
    for before, after in pairwise(of_layer):
        cast(FSDPModule, before[0]).set_modules_to_forward_prefetch(cast(list[FSDPModule], after))
        cast(FSDPModule, after[0]).set_modules_to_backward_prefetch(cast(list[FSDPModule], before))


def _experts_in(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of the experts of every layer, as `transformers.integrations.moe` marks them."""
    for name, module in model.named_modules():
        if has_experts(module):
            yield name, module


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """Where one pass sent its rows. T tokens go to k experts each."""

    order: RowOrder
    weights: Tensor
    """[T, k]"""
    there: list[int]
    """By rank, the rows that it gets from this one."""
    here: list[int]
    """By rank, the rows that this one gets from it."""


class _Exchange:
    """Sends tokens to the ranks of their experts before a module of experts runs, and its outputs back after it."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sent: _Sent | None = None

    @uncompiled
    def send(
        self, experts: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Replace tokens [T, H], their experts [T, k] and weights [T, k] by rows of this rank's experts, each with one expert and weight 1."""
        given = [*args, *options.values()]
        hidden, chosen, weights = given
        order = RowOrder(chosen)
        ranks = self._group.size()
        of_rank = _innermost(experts).num_experts
        ends = order.ends(ranks * of_rank)
        leaving = ends.diff(prepend=ends.new_zeros(1))
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self._group)
        by_rank = torch.stack([leaving, coming]).view(2, ranks, of_rank).sum(2)
        there, here = by_rank.tolist()  # here the host waits for the device
        self._sent = _Sent(order, weights, there, here)
        rows = exchange_rows(order.spread(hidden), there, here, self._group)
        own = torch.arange(of_rank, device=coming.device).repeat(ranks)
        own = own.repeat_interleave(coming, output_size=sum(here))
        if not sum(here):
            # One row of zeros, so that the experts get a gradient, which all ranks sum together.
            rows = functional.pad(rows, (0, 0, 0, 1))
            own = own.new_zeros(1)
        return (rows, own[:, None], rows.new_ones(len(rows), 1)), {}

    @uncompiled
    def send_back(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the weighted sums [T, H] of the outputs of each token's experts."""
        sent = self._sent
        assert sent is not None
        self._sent = None
        rows = exchange_rows(output[: sum(sent.here)], sent.here, sent.there, self._group)
        return sent.order.weighted(rows, sent.weights).to(output.dtype)


def _innermost(module: Any) -> Any:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module
