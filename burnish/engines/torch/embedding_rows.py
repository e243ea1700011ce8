"""Fetch the rows of the embeddings that a pass needs, instead of gathering the whole table.

A pass needs at most one row for each of its tokens. Each of P ranks holds every P-th run of rows. Larger parts would be unequal work: frequent
tokens have low numbers in most vocabularies, so the first rank would send most rows.

Before a pass the hosts agree on the most rows that a rank needs from another. All messages are equally long, so no host waits for its device.
Ranks send numbers of rows, rows, and in the backward pass gradients in the compute dtype. The holder adds them in fp32, rank by rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from burnish.config.schema import EngineConfig
from burnish.distributed.collectives import total
from burnish.distributed.layout import Layout
from burnish.engines.base import compute_dtype
from burnish.errors import BurnishError
from burnish.models.packing import Indices, host_tensor
from burnish.models.parts import ShardRule, keep_parts
from burnish.models.scorer import Scorer

# Most rows of a run. They fill half a block of a checkpoint of an 8 B model.
_LONGEST_RUN = 256
# Least runs of a rank.
_FEWEST_RUNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class FetchedRows:
    """The rows that a pass over C tokens gets from P ranks, M from each. Those that it does not need fill the messages."""

    wanted: Tensor
    """[P · M] int64, by holder: rows among those that it holds."""
    places: Tensor
    """[C] int64, the fetched row of each token."""


class EmbeddingRows:
    """The rows of one table that this rank holds, and the exchange of rows."""

    def __init__(
        self,
        embedding: nn.Embedding,
        group: ProcessGroup,
        copies: ProcessGroup | None,
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        """Divide the table of `embedding` over `group`. `copies`: the ranks that hold the same rows; None: no other. Rows travel in `dtype`."""
        self.dtype = dtype
        """The dtype in which rows and gradients travel."""
        self._group = group
        self._ranks = group.size()
        self._copies = copies
        self._layout = layout
        self._size = embedding.num_embeddings
        self._run = min(_LONGEST_RUN, self._size // (_FEWEST_RUNS * self._ranks))
        # Its gradient is 0. By itself the module would leave out the fetched row of this number.
        self._padding = embedding.padding_idx
        embedding.padding_idx = None
        self._fetched: FetchedRows | None = None
        self._table: nn.Parameter | None = None
        embedding.register_forward_pre_hook(self._fetch, with_kwargs=True)
        embedding.register_forward_hook(self._restore, always_call=True)

    @property
    def cut(self) -> ShardRule:
        """This rank's rows."""
        starts = range(self._group.rank() * self._run, self._size, self._ranks * self._run)
        return ShardRule(0, tuple(range(n, min(n + self._run, self._size)) for n in starts))

    def plan(self, token_ids: Indices) -> FetchedRows:
        """Plan a pass over tokens [C], on the host. Collective."""
        needed, places = np.unique(token_ids, return_inverse=True)
        holder, own = self._place(needed)
        order = np.argsort(holder, kind="stable")
        counts = np.bincount(holder, minlength=self._ranks)
        first = np.cumsum(counts) - counts
        by_holder = holder[order]
        most = int(total(torch.tensor([counts.max()]), self._layout, dist.ReduceOp.MAX))
        slots = np.empty_like(needed)
        slots[order] = by_holder * most + np.arange(len(needed)) - first[by_holder]
        wanted = np.zeros(self._ranks * most, np.int64)
        wanted[slots] = own
        return FetchedRows(*map(host_tensor, (wanted, slots[places])))

    def begin(self, fetched: FetchedRows) -> None:
        """Fetch these rows when the embeddings are called."""
        self._fetched = fetched

    def sum_copies(self, gradient: Tensor | None) -> None:
        """Sum the gradient of this rank's rows, if there is one, over the copies of the model, in place. Collective."""
        if self._copies is not None and gradient is not None:
            dist.all_reduce(gradient, group=self._copies)

    def exchanged(self, messages: Tensor) -> Tensor:
        """Send part r of `messages` [P · M, ...] to rank r; return the parts received. Collective."""
        received = torch.empty_like(messages)
        dist.all_to_all_single(received, messages.contiguous(), group=self._group)
        return received

    def add(self, table: Tensor, rows: Tensor, gradients: Tensor) -> None:
        """Add gradients [P · M, H] to those of the table's `rows` [P · M]. All ranks get a gradient, even of zeros."""
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        # A rank wants each row once, so all additions of one call are to different rows: any order gives the same bits.
        parts = zip(rows.chunk(self._ranks), gradients.chunk(self._ranks), strict=True)
        for of_rank, gradient in parts:
            table.grad.index_add_(0, of_rank, gradient.to(table.grad.dtype))
        if self._padding is not None:
            holder, own = self._place(np.array([self._padding]))
            if holder[0] == self._group.rank():
                table.grad[int(own[0])].zero_()

    def _place(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the rank that holds each row of the table, and the row's place on it."""
        run, within = np.divmod(rows, self._run)
        turn, holder = np.divmod(run, self._ranks)
        return holder, turn * self._run + within

    def _fetch(
        self, embedding: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Have the module compute with fetched rows, and with their places for the tokens."""
        [token_ids] = [*args, *options.values()]
        fetched = self._fetched
        self._fetched = None
        if fetched is None or fetched.places.numel() != token_ids.numel():
            raise BurnishError(
                "a model asked for embeddings of other tokens than those that are computed",
                have=f"{type(embedding).__name__} called with {tuple(token_ids.shape)} tokens",
                want="one call in a pass, with the tokens that the model got",
                do="set engine.replicas to the number of processes, or train a model of another family",
            )
        rows = _Fetch.apply(embedding.weight, self, fetched.wanted)  # type: ignore[no-untyped-call]
        self._table = embedding.weight
        del embedding.weight  # a module takes no plain tensor for a parameter
        embedding.weight = rows
        return (fetched.places.view_as(token_ids),), {}

    def _restore(self, embedding: nn.Module, *_: Any) -> None:
        if self._table is not None:
            del embedding.weight
            embedding.register_parameter("weight", self._table)
            self._table = None


def share_rows(
    scorer: Scorer, config: EngineConfig, mesh: DeviceMesh, layout: Layout
) -> dict[str, ShardRule]:
    """Have `scorer` (on meta) fetch rows over a mesh (replicas, shard), and return the cut by parameter.

    Return nothing, and change nothing, for few rows, and for a table on the host: its rows would wait for numbers from the device. Nor for
    embeddings that PEFT wraps, to train them beside an adapter.
    """
    embedding: Any = scorer.model.get_input_embeddings()
    if config.parameter_offload or not isinstance(embedding, nn.Embedding):
        return {}
    group = mesh["shard"].get_group()
    if embedding.num_embeddings < _FEWEST_RUNS * group.size():
        return {}
    copies = mesh["replicas"].get_group() if mesh["replicas"].size() > 1 else None
    scorer.rows = EmbeddingRows(embedding, group, copies, layout, compute_dtype(config))
    names = (n for n, p in scorer.model.named_parameters() if p is embedding.weight)
    cuts = {next(names): scorer.rows.cut}
    keep_parts(scorer.model, cuts)
    return cuts


class _Fetch(torch.autograd.Function):
    """The rows of all ranks that this rank wants. The backward pass adds to the table's gradient itself, since most of it is 0."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: EmbeddingRows, wanted: Tensor) -> Tensor:
        asked = rows.exchanged(wanted)
        ctx.table = table
        ctx.rows = rows
        ctx.asked = asked
        return rows.exchanged(table.detach().index_select(0, asked).to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.rows.add(ctx.table, ctx.asked, ctx.rows.exchanged(gradients[0]))
        return None, None, None
