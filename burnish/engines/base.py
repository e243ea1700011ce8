"""The engine protocol: everything that trainers know of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from burnish.boxes.shards import Publication, Shard, ShardSource
from burnish.config.schema import EngineConfig
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.models.flops import Passed
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

LossFn = Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]
"""Pure, without collectives. Returns the micro-batch's part of the loss, and its statistics. Parts add
up over micro-batches and ranks: each is divided by the *global* counts in the micro-batch."""


class Part(Enum):
    """Which tensors of an engine are meant."""

    WEIGHTS = "weights"
    """What is trained, the model or its adapter; fp32 where the engine keeps fp32 main weights."""
    FROZEN = "frozen"
    """The model beside a trained adapter, in the compute dtype; none otherwise."""
    TRAINING = "training"
    """Optimizer slots, named `exp_avg/<weight>` and so on."""


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of matrix products, in training and generation. `precision` is no longer auto."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.precision]


class Engine(Protocol):
    """A trained model on this process, whatever cuts it."""

    layout: Layout
    """Where this process stands."""
    arena: Arena
    """The process's host memory beside the device."""
    steps: int
    """Optimizer steps taken, without skipped ones; for Adam's bias correction. Settable, for resuming."""
    skipped_in_a_row: int
    """Steps skipped since the last one taken. Settable, for resuming."""
    passed: Passed
    """What `forward_backward` has computed, by all ranks that share this one's tokens. Settable, to count anew."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """Run every micro-batch, accumulate gradients, and return statistics reduced over all ranks.

        The statistic `loss` is that of the step. Gradients are reduced once, or each time with `engine.reduce_each_microbatch`.
        Another call before `optim_step` adds to them.
        """

    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """Return the outputs of this rank's micro-batches, on its device, without gradients.

        Ranks that share a micro-batch get the same bits.
        `adapter` False turns an adapter off. `experts` records where tokens go.
        """

    def optim_step(self, lr: float) -> Stats:
        """Clip, step, zero the gradients; return `grad_norm` (before clipping), `lr`, `skipped`.

        A non-finite norm skips the step on every rank. Too many in a row raise `BurnishError`.
        """

    def shards(self, what: Part) -> Iterator[Shard]:
        """Yield this rank's pieces, in the same order of names on every rank."""

    def published(self) -> Publication:
        """Return this rank's pieces for a generator, an adapter merged or beside (`model.lora.publish`). Collective."""

    def load(self, source: ShardSource, what: Part) -> None:
        """Fill this rank's pieces. Collective."""

    def parked(self) -> AbstractContextManager[None]:
        """Keep weights, gradients and slots in host memory inside the block, which must not use the engine. Collective."""

    def close(self) -> None:
        """Free what the engine holds."""
