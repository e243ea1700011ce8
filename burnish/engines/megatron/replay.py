"""Prescribe, record and even out the experts of tokens, through Megatron's RouterReplay.

Instructions travel through the layers beside a micro-batch's packing, as in `burnish.models.routing`, so a layer that is computed
again does the same. Records are those of the torch engine: every router for every token, the same on all ranks that share a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from burnish.distributed.collectives import gather_rows
from burnish.engines.sharded_engine import routing_of
from burnish.errors import IncompatibleError
from burnish.models.routing import Routing, TokenRows, index_dtype, require_recorded
from burnish.records import MicroBatch


class RoutedLayer(TransformerLayer):
    """A layer with experts; its router does what the `routing` of a micro-batch's packing says."""

    def __init__(self, *args: Any, router: int, **options: Any) -> None:
        """`router`: its number among all routers of the model."""
        super().__init__(*args, **options)
        self.number = router
        # Megatron keeps one list of all there are; here each is told what to do by its own layer.
        replay = self.mlp.router.router_replay
        RouterReplay.global_router_replay_instances.remove(replay)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Megatron's, whose router sends tokens where they are to go, and writes down where they went."""
        routing: Routing | None = options["packed_seq_params"].routing
        router = self.mlp.router
        router.balance = None if routing is None else routing.balance
        if routing is None:
            return super().forward(*args, **options)
        replay = router.router_replay
        if routing.prescribed is None:
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        else:
            replay.set_target_indices(routing.prescribed[:, self.number].long())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = super().forward(*args, **options)
        chosen = replay.target_topk_idx if routing.prescribed is not None else None
        chosen = replay.get_recorded_indices() if chosen is None else chosen
        routing.chosen[self.number] = chosen.to(index_dtype(self.config.num_moe_experts))
        if routing.balance is not None:
            routing.losses[self.number] = router.loss
        replay.clear_indices()
        replay.clear_router_replay_action()
        return output


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What the routers of a model are told, and what they have to say."""

    routers: tuple[int, int, int]
    """Routers, experts of each, and experts that each token goes to; zeros for a dense model."""
    groups: ProcessGroupCollection
    """Where this rank stands: pipeline ranks have other routers, tensor ranks other rows."""
    device: torch.device

    def require(self, micros: Iterable[MicroBatch], *, record: bool = False) -> None:
        """Raise `IncompatibleError` for prescribed experts that cannot be of this model, or where there are none to `record`."""
        routers, experts, chosen = self.routers
        prescribed = [(len(m.input_ids), m.experts) for m in micros if m.experts is not None]
        if routers == 0 and (record or prescribed):
            raise IncompatibleError(
                "the experts of a model were asked for, which has none",
                have="a dense model",
                want="a mixture of experts",
                do="set algorithm.router_replay=none",
            )
        for tokens, recorded in prescribed:
            require_recorded(recorded, (tokens, routers, chosen), experts)

    def routing_of(
        self, micro: MicroBatch, rows: TokenRows, *, record: bool, factors: Tensor | None = None
    ) -> Routing | None:
        """Return the instructions for the routers of this rank, which see its part of the rows that tensor ranks share."""
        tensor, own = self.groups.tp.rank(), rows.deal.rows // self.groups.tp.size()
        part = slice(tensor * own, (tensor + 1) * own)
        return routing_of(micro, rows, self.device, record=record, factors=factors, part=part)

    def record(self, chosen: Mapping[int, Tensor], rows: TokenRows) -> Tensor:
        """Return the experts [T, L, k] of all tokens and routers. Collective among the ranks that share the micro-batch."""
        (routers, experts, chosen_of_each), tensor = self.routers, self.groups.tp
        own = rows.deal.rows // tensor.size()
        kind = index_dtype(experts)
        found = torch.zeros((own, routers, chosen_of_each), dtype=kind, device=self.device)
        for number, of_router in chosen.items():
            found[:, number] = of_router.to(kind)
        in_bytes = found.view(torch.uint8)  # since not every backend sends int16
        if self.groups.pp.size() > 1:  # each router is in one stage, and zero elsewhere
            dist.all_reduce(in_bytes, group=self.groups.pp)
        if tensor.size() > 1:
            in_bytes = gather_rows(in_bytes, tensor)
        return rows.tokens_of(in_bytes.view(kind))
