"""Compute common beginnings of packed sequences once, and take rows of tensors.

A hidden state depends only on the tokens up to it. So a micro-batch's sequences form a tree of
prefixes (a trie), and each node is one row. Attention has one query for each row, and the keys of every sequence.

On accelerators, the backward pass of torch's `index_select` adds up a row's gradients in any order.
`RowMap` adds them in their own order, in fp32, so the sum is always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish.distributed.device import compiles_triton
from burnish.records import to_device

Indices = npt.NDArray[np.int64]
"""Row numbers on the host, shape [N]."""

# The tree is used if it saves one token in this many. Otherwise, taking rows costs more than it saves.
_WORTHWHILE = 8


def host_tensor(values: Indices) -> Tensor:
    """Return numbers as a tensor of the host."""
    return torch.from_numpy(np.ascontiguousarray(values))


def on_device(values: Indices, device: torch.device) -> Tensor:
    """Copy numbers to a tensor."""
    return to_device(host_tensor(values), device)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """The C computed tokens of T packed ones, and which stands for each token."""

    computed: Indices
    """[C], the packed tokens that are computed, ascending."""
    rows: Indices
    """[T], the place of each packed token among the computed ones."""
    own: tuple[int, ...]
    """How many of each sequence's last tokens are computed for it. None, if it is the beginning of another sequence."""

    @classmethod
    def of(cls, token_ids: Indices, lengths: Sequence[int], *, shares: bool = True) -> PrefixTree:
        """Build the tree of packed `token_ids` [T]. Unless it `shares`, or if that saves little, all tokens are computed."""
        ends = np.cumsum(lengths)
        sequences = np.split(token_ids, ends[:-1])
        keys = [sequence.astype(">i8").tobytes() for sequence in sequences]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        same = np.arange(len(token_ids))  # for each token, the one that stands for it
        own = list(lengths)
        for later, earlier in pairwise(reversed(order)):  # a longer sequence before its beginning
            common = _common(sequences[earlier], sequences[later])
            begin = ends[earlier] - lengths[earlier]
            start = ends[later] - lengths[later]
            same[begin : begin + common] = same[start : start + common]
            own[earlier] -= common
        computed, rows = np.unique(same, return_inverse=True)
        if shares and (len(token_ids) - len(computed)) * _WORTHWHILE >= len(token_ids):
            return cls(computed, rows, tuple(own))
        everything = np.arange(len(token_ids))
        return cls(everything, everything, tuple(lengths))


def _common(one: Indices, other: Indices) -> int:
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    return int(different.argmax()) if different.any() else shorter


@dataclass(frozen=True, slots=True, eq=False)
class TokenSharing:
    """The tokens of each rank, where several ranks share a micro-batch.

    Token t goes to rank t mod ranks, which spreads cheap prompts and expensive completions evenly.
    Padding rows give every rank equally many.
    """

    rank: int
    """This rank, among those that share the tokens."""
    ranks: int
    """Number of ranks that share them."""
    count: int
    """Tokens of all ranks."""
    rows: int
    """Tokens of each rank, padding included."""
    group: ProcessGroup | None = None
    """The ranks; None: this rank has all tokens."""

    @classmethod
    def of(cls, count: int, group: ProcessGroup | None = None, multiple: int = 1) -> TokenSharing:
        """Divide `count` tokens among the ranks of `group`, by multiples of `multiple`."""
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        rows = -(-count // (ranks * multiple)) * multiple
        return cls(rank, ranks, count, rows, group)

    def mine(self, values: Indices) -> Indices:
        """Return this rank's part [rows] of one value per token [count]; 0 for padding."""
        own = values[self.rank :: self.ranks]
        return np.pad(own, (0, self.rows - len(own)))

    def owner(self, tokens: Indices) -> Indices:
        """Return the rank of each token."""
        return tokens % self.ranks

    def place(self, tokens: Indices) -> Indices:
        """Return the row of each token on its rank."""
        return tokens // self.ranks


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """The row of a source for each row of a result."""

    index: Tensor
    """[N] int64: result row i is source row `index[i]`."""
    rounds: tuple[tuple[Tensor, Tensor], ...] = ()
    """Without Triton: pairs (source rows, result rows), both [n] int64; no source row is twice in one round."""
    segments: tuple[Tensor, Tensor, Tensor] | None = None
    """With Triton: see `burnish.models.kernels.triton_sums.add_segments`."""

    @classmethod
    def of(cls, index: Indices, device: torch.device) -> RowMap:
        """Plan the backward pass's sums for a device. The tensors stay on the host until `burnish.records.plan_on_device`."""
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        fresh = np.diff(ordered, prepend=-1) != 0
        if compiles_triton(device):
            starts = np.append(np.flatnonzero(fresh), len(index))
            segments = order, starts, ordered[fresh]
            by_place, ends, places = (host_tensor(each) for each in segments)
            return cls(host_tensor(index), segments=(by_place, ends, places))
        steps = np.arange(len(index))
        repeat = steps - np.maximum.accumulate(np.where(fresh, steps, 0))
        rounds = tuple(
            (host_tensor(ordered[repeat == n]), host_tensor(order[repeat == n]))
            for n in range(int(repeat.max(initial=-1)) + 1)
        )
        return cls(host_tensor(index), rounds)

    def take(self, source: Tensor) -> Tensor:
        """Return `source[index]`, differentiable."""
        return _Take.apply(source, self)  # type: ignore[no-untyped-call]


def select_rows(
    source: Tensor, rows: Tensor, backward_rows: Tensor, zero_rows: Tensor | None
) -> Tensor:
    """Return `source[rows]`, whose gradient is `gradient[backward_rows]`, 0 in `zero_rows`; all int64.

    Correct only if each source row outside `zero_rows` gets a gradient from at most one result row.
    """
    return _SelectRows.apply(source, rows, backward_rows, zero_rows)  # type: ignore[no-untyped-call]


def _kernels() -> Any:
    from burnish.models.kernels import triton_sums

    return triton_sums


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        ctx.shape = source.shape
        return source.index_select(0, rows.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        upstream = gradients[0]
        if ctx.rows.segments is not None:
            add_segments = _kernels().add_segments
            return add_segments(upstream, *ctx.rows.segments, ctx.shape[0]), None
        rounds = ctx.rows.rounds
        dtype = torch.float32 if len(rounds) > 1 else upstream.dtype
        # In rounds: on CUDA, index_add_ adds equal rows in any order, and a repeated step would have other bits.
        total = upstream.new_zeros(ctx.shape, dtype=dtype)
        for number, (sources, results) in enumerate(rounds):
            part = upstream.index_select(0, results).to(dtype)
            if number == 0 and len(sources) == len(total):  # every row, in order
                total = part
            else:
                total.index_add_(0, sources, part)
        return total.to(upstream.dtype), None


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Tensor, rows: Tensor, backward_rows: Tensor, zero_rows: Tensor | None
    ) -> Tensor:
        ctx.backward_rows = backward_rows
        ctx.zero_rows = zero_rows
        return source.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].index_select(0, ctx.backward_rows)
        if ctx.zero_rows is not None:
            gradient.index_fill_(0, ctx.zero_rows, 0)
        return gradient, None, None, None
