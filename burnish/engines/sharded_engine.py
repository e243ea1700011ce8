"""The common part of both engines: count and skip steps, reduce statistics, balance experts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from burnish.algorithms.base import SparseLoss
from burnish.config.schema import EngineConfig
from burnish.distributed.collectives import reduce_stats
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, LossFn
from burnish.errors import BurnishError
from burnish.models.flops import Passed
from burnish.models.meta_init import router_sizes
from burnish.models.scorer import ScoringPlan
from burnish.records import Batch, MicroBatch
from burnish.tracking.stats import Mean, Stats, Sum

T = TypeVar("T")


class _CountsSteps(Protocol):
    steps: int

    def set_steps(self, steps: int) -> None: ...


def trained(optimizer: T | None) -> T:
    """Return the optimizer. Raises `BurnishError` for an engine without one."""
    if optimizer is None:
        raise BurnishError(
            "a frozen engine was asked to train",
            have="an engine made without an optimizer",
            want="an engine made with one",
            do="pass `optim` when making the engine",
        )
    return optimizer


class ShardedEngine(Engine):
    """See `burnish.engines.base.Engine`."""

    _optimizer: _CountsSteps | None
    _sharing: tuple[ProcessGroup | None, int]
    """The ranks that share a micro-batch's tokens, and a number that must divide each rank's token count."""
    _rows: Any = None
    """Fetches rows of the embeddings (`burnish.engines.torch.embedding_rows`); None: every rank has them all, or gathers them."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: EngineConfig,
        layout: Layout,
        device: torch.device,
        arena: Arena,
    ) -> None:
        self._config = config
        self._device = device
        self._router_sizes = router_sizes(hf_config)
        self.layout = layout
        self.arena = arena
        self.skipped_in_a_row = 0
        self.passed = Passed()

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return trained(self._optimizer).steps

    @steps.setter
    def steps(self, value: int) -> None:
        trained(self._optimizer).set_steps(value)

    def _require_routers(self, batch: Batch, *, record: bool = False) -> None:
        """Raise `IncompatibleError` for another model's experts, or if the model has none to `record`."""
        if record or any(micro.experts is not None for micro in batch.microbatches):
            from burnish.engines.expert_load import require_routed

            require_routed(batch, self._router_sizes)

    def _balanced(self, batch: Batch) -> tuple[Batch, Tensor | None, Stats]:
        """Return the batch with its tokens' experts, the factors of `Routing.balance`, and `moe/load_imbalance`."""
        is_routed = batch.is_routed  # raises if only some micro-batches are routed
        self._require_routers(batch)
        if self._config.router_aux_loss == 0:
            return batch, None, Stats()
        if not is_routed:
            batch = batch.with_experts(self.forward(batch, experts=True))
        from burnish.engines.expert_load import balance

        place = self.layout, self._device
        return batch, *balance(batch, self._router_sizes, self._config.router_aux_loss, *place)

    def _plan(
        self, micro: MicroBatch, loss: LossFn | None = None, *, shares: bool = True
    ) -> ScoringPlan:
        given = (micro.input_ids, micro.cu_seqlens, micro.loss_mask, self._device)
        learned = loss.learned(micro) if isinstance(loss, SparseLoss) else None
        return ScoringPlan.of(
            *given, *self._sharing, shares=shares, rows=self._rows, learned=learned
        )

    def _routing(
        self, micro: MicroBatch, plan: ScoringPlan, factors: Tensor | None, *, record: bool
    ) -> Any:
        if micro.experts is None and factors is None and not record:
            return None
        from burnish.engines.expert_load import routing_of

        return routing_of(micro, plan, self._part(plan), factors, self._device)

    @cached_property
    def _bias_updates(self) -> Any:
        """`burnish.engines.expert_load.BiasUpdates`; None: biases stay as loaded."""
        if not (rate := self._config.router_bias_update_rate):
            return None
        from burnish.engines.expert_load import BiasUpdates

        place = self.layout, self._device
        return BiasUpdates(self._router_biases, self._router_sizes, rate, *place)

    @abstractmethod
    def _router_biases(self) -> Iterable[tuple[int, Tensor]]:
        """Return number and bias of each router of this rank."""

    @abstractmethod
    def _part(self, plan: ScoringPlan) -> tuple[slice, int]:
        """Return the slice of a rank's rows that its routers see, and how many ranks see it."""

    def _reduced(self, stats: Stats, loss: Tensor, router_loss: Tensor, layout: Layout) -> Stats:
        """Return the statistics of all ranks, with `loss` and perhaps `moe/aux_loss`. Collective.

        Both losses are this rank's 0-d parts of sums over the global batch.
        """
        sums = {"loss": Sum(loss + router_loss)}
        if self._config.router_aux_loss:
            sums["moe/aux_loss"] = Sum(router_loss / self._config.router_aux_loss)
        reduced = reduce_stats(Stats(stats | sums), layout, self._device)
        return Stats(reduced | {name: Mean(reduced[name].value(), 1.0) for name in sums})

    def _stepped(self, norm: float, lr: float) -> Stats:
        """Count a step with this gradient norm; return its statistics."""
        is_skipped = not math.isfinite(norm)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        if self.skipped_in_a_row >= self._config.max_skipped_steps:
            raise BurnishError(
                f"training diverged: the gradient norm was not finite in {self.skipped_in_a_row} steps in a row",
                have=f"gradient norm {norm}",
                want="a finite norm",
                do="lower optim.lr, or start from an earlier checkpoint; "
                "engine.max_skipped_steps sets how many are tolerated",
            )
        stats = Stats(grad_norm=Mean(norm, 1.0), lr=Mean(lr, 1.0), skipped=Sum(float(is_skipped)))
        if self._bias_updates is None:
            return stats
        return Stats(stats | self._bias_updates.step(is_skipped=is_skipped))
