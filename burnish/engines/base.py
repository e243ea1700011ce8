"""The engine protocol: everything that trainers know of an engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication, Shard, ShardSource
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.models.flops import Passed
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

if TYPE_CHECKING:
    from burnish.models.mtp_names import MTPNames

LossFn = Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]
"""A pure function without collectives. It returns the micro-batch's part of the loss, and its statistics. Parts add
up over micro-batches and ranks, because each is divided by the *global* counts that the micro-batch carries. A
`burnish.algorithms.base.SparseLoss` also says which tokens it gives a gradient."""


class Part(Enum):
    """The kinds of tensors that an engine holds."""

    WEIGHTS = "weights"
    """The trained weights, of the model or its adapter; fp32 where the engine keeps fp32 main weights."""
    FROZEN = "frozen"
    """The frozen model under a trained adapter, in the compute dtype; nothing without an adapter."""
    TRAINING = "training"
    """Optimizer slots, named `exp_avg/<weight>` and so on."""


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of matrix products, in training and generation. `precision` must not be auto."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.precision]


class Engine(Protocol):
    """This process's part of a trained model, under any parallelism.

    `engine.kind` names the class. Burnish makes one object for each model: the policy, a critic, a reference.
    """

    def __init__(  # noqa: PLR0913
        self,
        hf_config: PretrainedConfig,
        config: EngineConfig,
        optim: OptimConfig | None,
        *,
        layout: Layout,
        device: torch.device,
        beside: Engine | None,
        lora: LoraConfig | None = None,
        train: Sequence[str] = (),
        mtp: MTPNames | None = None,
    ) -> None:
        """Make the model of `hf_config` without weights. Collective.

        `layout` has the processes; the engine's own says how they divide the model. Without `optim` the engine is frozen, in
        the compute dtype. With `beside`, which may be of another class, it may share that engine's process groups. `lora` comes
        only where `model.lora` is set: an adapter is trained beside a frozen model. `train` comes only where `model.train` is, and
        `mtp` where `model.train_mtp` is.
        """

    layout: Layout
    """This process's place in the run."""
    arena: Arena
    """The process's host memory for tensors that leave the device."""
    steps: int
    """Optimizer steps taken, not counting skipped ones; for Adam's bias correction. Settable, for resuming."""
    skipped_in_a_row: int
    """Steps skipped since the last one taken. Settable, for resuming."""
    passed: Passed
    """Tokens that went through `forward_backward`. Each rank counts its shared micro-batches in full. Settable, to restart the count."""

    @staticmethod
    def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
        """Raise `UsageError` or `IncompatibleError` if the engine cannot compute the model or divide it.

        Runs and dry runs call it before anything expensive. By default it raises nothing.
        """
        return

    @abstractmethod
    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        """Run every micro-batch, accumulate gradients, and return statistics reduced over all ranks.

        The statistic `loss` is the step's. Gradients are reduced once, or per micro-batch with `engine.reduce_each_microbatch`.
        Another call before `optim_step` adds to them.
        """

    @abstractmethod
    def forward(
        self, batch: Batch, *, adapter: bool = True, experts: bool = False
    ) -> list[TokenOutputs]:
        """Return the outputs of this rank's micro-batches, on its device, without gradients.

        Ranks that share a micro-batch get the same bits.
        `adapter` False turns an adapter off. `experts` records each token's experts.
        """

    @abstractmethod
    def optim_step(self, lr: float) -> Stats:
        """Clip, step, zero the gradients; return `grad_norm` (before clipping), `lr`, `skipped`.

        A non-finite norm skips the step on every rank. Too many in a row raise `BurnishError`.
        """

    @abstractmethod
    def shards(self, what: Part) -> Iterator[Shard]:
        """Yield this rank's shards, in the same order of names on every rank."""

    @abstractmethod
    def published(self) -> Publication:
        """Return this rank's shards for a generator, an adapter merged or separate (`model.lora.publish`). Collective."""

    @abstractmethod
    def load(self, source: ShardSource, what: Part) -> None:
        """Fill this rank's shards. Collective."""

    @abstractmethod
    def offloaded(self) -> AbstractContextManager[None]:
        """Keep weights, gradients and slots in host memory inside the block, which must not use the engine. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine's memory."""
