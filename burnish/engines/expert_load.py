"""How evenly a step uses its experts: the means of the load-balancing loss over all tokens.

The loss (`burnish.models.routing`) is a product of two means over tokens. Per micro-batch, as in transformers, it would depend on
the cut. Here both means are over all tokens of a step on all ranks, so every cut gives the value of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.distributed.layout import Layout
from burnish.models.routing import Balance, Routing, TokenRows
from burnish.records import Batch, MicroBatch
from burnish.tracking.stats import Mean, Stats


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """How many choices of each router fell on each expert, over all ranks."""

    counts: Tensor
    """[L, E] int64."""

    @classmethod
    def of(
        cls, batch: Batch, routers: int, experts: int, layout: Layout, device: torch.device
    ) -> ExpertLoad:
        """Count the experts of a batch's tokens, filler left out. Collective."""
        counts = torch.zeros(routers * experts, dtype=torch.int64, device=device)
        starts = torch.arange(routers, device=device)[:, None] * experts
        for micro, numbers in zip(batch.microbatches, batch.examples, strict=True):
            if micro.experts is not None and numbers != (-1,):
                places = micro.experts.to(device).long() + starts
                counts += torch.bincount(places.flatten(), minlength=len(counts))
        if layout.world > 1:
            dist.all_reduce(counts)
            counts //= layout.sharing
        return cls(counts.view(routers, experts))

    def factors(self, coefficient: float, chosen: int) -> Tensor:
        """[E] fp32: c E f_e / (N L), with `chosen` experts per token (`Balance.factors`)."""
        choices = self.counts.sum(dim=0)
        rows = (choices.sum() / chosen).clamp(min=1)
        return coefficient * len(choices) * choices / rows.square()

    def stats(self) -> Stats:
        """Return `moe/load_imbalance`: a router's busiest expert over the mean of its experts, averaged over routers; 1 is even."""
        busiest, mean = self.counts.amax(dim=1), self.counts.float().mean(dim=1)
        return Stats({"moe/load_imbalance": Mean((busiest / mean).mean(), 1.0)})


def routing_of(
    micro: MicroBatch,
    rows: TokenRows,
    device: torch.device,
    *,
    record: bool,
    factors: Tensor | None,
    tensor: int,
) -> Routing | None:
    """Return the routers' instructions for a micro-batch; None if there are none.

    They send tokens to the batch's experts, if any. `record`: note where tokens go. `factors`: add the load-balancing loss of this
    rank's rows, which `tensor` ranks compute each.
    """
    if micro.experts is None and factors is None and not record:
        return None
    routing = Routing()
    if micro.experts is not None:
        routing.prescribed = rows.rows_of(micro.experts).to(device, non_blocking=True)
    if factors is not None:
        routing.balance = Balance(factors, rows.weights(device) / tensor)
    return routing
