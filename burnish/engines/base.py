"""The engine protocol: everything that trainers know of an engine.

The engine iterates micro-batches itself, which hides pipeline parallelism. It computes log-probs, because only it knows how the
vocabulary is cut.
"""

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
"""Pure, knows no collectives. Returns the micro-batch's part of the loss (a scalar: sums already
divided by the *global* counts in the micro-batch, so that adding over micro-batches and ranks gives
the loss of the step) and its statistics."""


class Part(Enum):
    """Which tensors of an engine are meant."""

    WEIGHTS = "weights"
    """What is trained: the model's parameters, or those of its adapter; fp32 where the engine keeps fp32 main weights."""
    FROZEN = "frozen"
    """The model's parameters where an adapter is trained in their place, in the dtype of computing; none otherwise."""
    TRAINING = "training"
    """Optimizer slots, named `exp_avg/<weight>` and so on."""


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of matrix products, in training and in generation. Precision is no longer auto."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.precision]


class Engine(Protocol):
    """A trained model on this process, whatever cuts it."""

    layout: Layout
    """Where this process stands."""
    arena: Arena
    """The process's host memory beside the device."""
    steps: int
    """Optimizer steps taken (skipped ones not counted); Adam's bias correction runs on it. Settable, for resuming."""

    skipped_in_a_row: int
    """Steps skipped since the last one taken. Settable, for resuming."""
    passed: Passed
    """What `forward_backward` has put through the model, on the ranks together that share tokens with this one. Settable, for counting anew."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """Run every micro-batch, accumulate gradients, and return statistics reduced over all ranks.

        `loss` is the loss of the step. Gradients are reduced over all processes once, in `optim_step` or with the last micro-batch;
        with `engine.reduce_each_microbatch` after each. Another call before `optim_step` adds to the gradients.
        """

    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """Return log-probs and entropies without gradients: one entry per micro-batch of this rank, on its device.

        With `adapter` False an adapter is off. With `experts` the outputs record where tokens went. Experts in the batch are used in
        any case.
        """

    def optim_step(self, lr: float) -> Stats:
        """Clip, step at this learning rate, zero the gradients.

        Returns `grad_norm` (before clipping), `lr`, `skipped`. A non-finite norm skips the step on every rank; too many in a row raise
        `BurnishError`.
        """

    def shards(self, what: Part) -> Iterator[Shard]:
        """This rank's pieces, in the same order of names on every rank."""

    def published(self) -> Publication:
        """Return this rank's pieces of the model for a generator; an adapter is merged or beside it (`model.lora.publish`). Collective."""

    def load(self, source: ShardSource, what: Part) -> None:
        """Fill this rank's pieces from a source. Collective."""

    def parked(self) -> AbstractContextManager[None]:
        """Keep weights, gradients and slots off the device inside the block; the engine must not be used there. Collective."""

    def close(self) -> None:
        """Free what the engine holds. It cannot be used afterwards."""
