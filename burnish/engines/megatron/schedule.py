"""Micro-batches through the pipeline, by Megatron's schedules.

All ranks that share a micro-batch pass the same ones. A micro-batch is planned when this rank's first stage needs it, so others
take no device memory. The last stage computes log-probs and losses. Records of experts are those of the torch engine: every router
for every token, the same on all ranks that share a micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from burnish.distributed.collectives import gather_rows
from burnish.engines.sharded_engine import routing_of
from burnish.errors import IncompatibleError
from burnish.models.flops import Passed
from burnish.models.kernels.ulysses import Division
from burnish.models.routing import Routing, TokenRows, index_dtype, require_recorded
from burnish.models.scorer import ScoringPlan
from burnish.records import Batch, MicroBatch, TokenOutputs

LossOf = Callable[[TokenOutputs, MicroBatch], Tensor]
"""The scalar that the backward pass of a micro-batch starts from."""


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """A micro-batch and what is computed for it on this rank."""

    plan: ScoringPlan
    temperature: float
    routing: Routing | None
    """What routers do; None: nothing out of the ordinary."""
    micro: MicroBatch | None
    """None for one that fills a round up and counts for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """How this rank runs its stages."""

    chunks: Sequence[Any]
    """Its stages, one for each virtual stage."""
    division: Division
    """What of a micro-batch's tokens is computed here."""
    rounds: int
    """The number of micro-batches has to be a multiple of so many."""
    device: torch.device
    routers: tuple[int, int, int]
    """Routers, experts of each, and experts that each token goes to; zeros for a dense model."""
    groups: ProcessGroupCollection
    """Where this rank stands: pipeline ranks have other routers, tensor ranks other rows."""

    def forward_backward(
        self, batch: Batch, loss: LossOf, factors: Tensor | None = None
    ) -> tuple[Tensor, Passed]:
        """Add the gradients of every micro-batch's loss, which the last stage computes in order.

        With `factors` (`ExpertLoad.factors`) add those of the load-balancing loss too, filler left out. Returns this rank's part of that
        loss, a scalar fp32, and the micro-batches that went through.
        """
        self._require_routers(batch.microbatches)
        passed: list[Passed] = []
        of_routers: list[dict[int, Tensor]] = []

        def planned() -> Iterator[_Planned]:
            for micro, numbers in zip(batch.microbatches, batch.examples, strict=True):
                made = self._planned(micro, factors=None if numbers == (-1,) else factors)
                passed.append(made.plan.passed)
                of_routers.append(made.routing.losses if made.routing else {})
                yield made

        self._run(planned(), len(batch.microbatches), loss, forward_only=False)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for losses in of_routers:
            total += sum(losses.values())
        return total, sum(passed, start=Passed())

    def forward(
        self, micros: Sequence[MicroBatch], *, record: bool = False
    ) -> tuple[list[TokenOutputs], list[Tensor]]:
        """Return the outputs of all micro-batches without gradients in the last stage; nothing in the others.

        With `record` every stage also returns the experts [T, L, k] of each micro-batch.
        """
        self._require_routers(micros, record=record)
        found: list[TokenOutputs] = []

        def keep(outputs: TokenOutputs, micro: MicroBatch) -> Tensor:
            found.append(outputs)
            return torch.zeros((), device=self.device)

        recorded: list[tuple[dict[int, Tensor], TokenRows]] = []

        def planned() -> Iterator[_Planned]:
            for micro in micros:
                made = self._planned(micro, record=record)
                if record and made.routing is not None:
                    recorded.append((made.routing.chosen, made.plan.rows))
                yield made

        with torch.no_grad():
            self._run(planned(), len(micros), keep, forward_only=True)
            experts = [self._record(*each) for each in recorded]
        return found, experts

    def _run(
        self, planned: Iterator[_Planned], count: int, loss: LossOf, *, forward_only: bool
    ) -> None:
        fillers = [self._filler()] * (-count % self.rounds)

        def stage_step(batches: Iterator[_Planned], chunk: Any) -> tuple[Any, Any]:
            batch = next(batches)
            output = chunk(batch.plan, batch.temperature, batch.routing)
            return output, lambda found: (_loss_of(batch, found, loss), _NO_TOKENS, None)

        run = get_forward_backward_func()
        run(
            forward_step_func=stage_step,
            data_iterator=_dealt(chain(planned, fillers), len(self.chunks)),
            model=list(self.chunks),
            num_microbatches=count + len(fillers),
            # Of no meaning: each exchange says the shape of what comes.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _planned(
        self, micro: MicroBatch, *, record: bool = False, factors: Tensor | None = None
    ) -> _Planned:
        plan = ScoringPlan.of(
            micro.input_ids, micro.cu_seqlens, micro.loss_mask, self.device, self.division
        )
        tensor, own = self.groups.tp.rank(), plan.rows.deal.rows // self.groups.tp.size()
        routing = routing_of(
            micro,
            plan.rows,
            self.device,
            record=record,
            factors=factors,
            part=slice(tensor * own, (tensor + 1) * own),
        )
        return _Planned(plan, micro.temperature, routing, micro)

    def _filler(self) -> _Planned:
        ids, ends = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1], dtype=torch.int32)
        plan = ScoringPlan.of(ids, ends, None, self.device, self.division)
        return _Planned(plan, 1.0, None, None)

    def _require_routers(self, micros: Iterable[MicroBatch], *, record: bool = False) -> None:
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

    def _record(self, chosen: Mapping[int, Tensor], rows: TokenRows) -> Tensor:
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


def _dealt(planned: Iterable[_Planned], readers: int) -> list[Iterator[_Planned]]:
    """Return iterators over all of these that drop an item once all have it; `itertools.tee` drops them in blocks of 57."""
    source, waiting = iter(planned), [deque[_Planned]() for _ in range(readers)]

    def of(own: deque[_Planned]) -> Iterator[_Planned]:
        while True:
            if not own:
                made = next(source, None)
                if made is None:
                    return
                for each in waiting:
                    each.append(made)
            yield own.popleft()

    return [of(own) for own in waiting]


_NO_TOKENS = 0
# Megatron divides by the tokens of a step where it is asked to; here losses are divided already.


def _loss_of(batch: _Planned, found: TokenOutputs, loss: LossOf) -> Tensor:
    if batch.micro is not None:
        return loss(found, batch.micro)
    said = found.values if len(found.values) else found.logprobs
    return said.sum() * 0.0
