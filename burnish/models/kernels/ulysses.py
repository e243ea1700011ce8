"""Ulysses sequence parallelism: several ranks share the tokens of a micro-batch (arXiv 2309.14509).

All layers but attention treat each token alone, so each rank runs them on its own tokens. For
attention the ranks trade: an all-to-all turns [own tokens, all heads] into [all tokens, own heads],
every rank computes its heads over whole sequences as if it were alone, and a second all-to-all turns
the output back.

Tokens are dealt like cards, token t to rank t mod ranks: attention does not mind, and so prompts and
completions, which cost the output layer nothing and all, fall to the ranks alike. What is missing
to an equal number for every rank is filled with rows that nothing reads.

Left out: ring attention, for which the number of heads is no limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from burnish.distributed.autograd import join, swap
from burnish.models.kernels.attention import Attends
from burnish.models.packing import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Among whom the tokens of micro-batches are divided."""

    group: ProcessGroup | None = None
    """The ranks that share them; None: this one has all."""
    multiple: int = 1
    """Each rank gets a multiple of so many tokens."""

    def deal(self, count: int) -> Deal:
        """The division of `count` tokens."""
        rank, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        rows = -(-count // (ranks * self.multiple)) * self.multiple
        return Deal(rank, ranks, count, rows)

    def attention(self, packing: Attends, deal: Deal) -> Attends:
        """Attention of the tokens that `deal` gives this rank, where `packing` is that of all tokens."""
        whole = self.group is None and deal.rows == deal.count
        return packing if whole else Ulysses(packing, deal, self.group)


ALL_TOKENS = Division()
"""Nothing is divided."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Which rank has which of `count` tokens."""

    rank: int
    """This rank, 0-based, among those that share the tokens."""
    ranks: int
    """How many they are."""
    count: int
    """Tokens of all ranks."""
    rows: int
    """Tokens of each rank, filler included."""

    def mine(self, values: Indices) -> Indices:
        """This rank's part [rows] of one value per token [count]; 0 for filler."""
        own = values[self.rank :: self.ranks]
        return np.pad(own, (0, self.rows - len(own)))

    def owner(self, tokens: Indices) -> Indices:
        """The rank that has each of these tokens."""
        return tokens % self.ranks

    def place(self, tokens: Indices) -> Indices:
        """Where each of these tokens is among the rows of its rank."""
        return tokens // self.ranks


@dataclass(frozen=True, slots=True, eq=False)
class Ulysses:
    """Attention whose queries, keys and values are those of this rank's tokens; travels as `packing`."""

    packing: Attends
    """Which of all tokens see each other."""
    deal: Deal
    """Which tokens are this rank's."""
    group: ProcessGroup | None
    """The ranks that share the tokens; None where this one has all, with filler."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Attends.attend`, of this rank's tokens; the number of heads is a multiple of the ranks.

        Key heads fewer than the ranks are repeated, so that every rank has those of its queries.
        """
        times = _repeats(query.shape[1], key.shape[1], self.deal.ranks)
        output = self.packing.attend(
            module,
            self._all_tokens(query),
            self._all_tokens(key.repeat_interleave(times, dim=1) if times > 1 else key),
            self._all_tokens(value.repeat_interleave(times, dim=1) if times > 1 else value),
            scaling,
            sliding_window,
        )
        return self._all_heads(output)

    def _all_tokens(self, heads: Tensor) -> Tensor:
        """From [1, heads, own tokens, d] to [1, own heads, all tokens, d]."""
        parts = heads[0].view(self.deal.ranks, -1, *heads.shape[2:]).transpose(1, 2)
        received = self._swap(parts)  # [ranks, own tokens, own heads, d]
        tokens = received.transpose(0, 1).flatten(0, 1)[: self.deal.count]
        return tokens.transpose(0, 1)[None]

    def _all_heads(self, output: Tensor) -> Tensor:
        """From [1, all tokens, own heads, d] to [1, own tokens, all heads, d]."""
        filler = self.deal.ranks * self.deal.rows - self.deal.count
        tokens = functional.pad(output[0], (0, 0, 0, 0, 0, filler))
        parts = tokens.view(-1, self.deal.ranks, *tokens.shape[1:]).transpose(0, 1)
        received = self._swap(parts)  # [ranks, own tokens, heads of that rank, d]
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _swap(self, parts: Tensor) -> Tensor:
        return parts if self.group is None else swap(parts, self.group)


def _repeats(heads: int, key_heads: int, ranks: int) -> int:
    """How often key heads are repeated: the least that gives every rank whole ones for its queries."""
    sharing = heads // key_heads
    return next(
        times
        for times in range(1, sharing + 1)
        if sharing % times == 0 and key_heads * times % ranks == 0
    )


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """How numbers that were computed where their tokens are come to all ranks that share the tokens."""

    group: ProcessGroup | None
    """The ranks; None: this one computed all."""
    mine: Indices
    """Which of all numbers this rank computes, ascending."""
    places: Indices
    """Where each of all numbers is in what `on_all_ranks` gives."""
    most: int
    """The most numbers of a rank; 1 where there are none, since nothing cannot be gathered."""

    @classmethod
    def of(cls, tokens: Indices, deal: Deal, group: ProcessGroup | None) -> Joined:
        """One number is computed of each of these tokens."""
        owner = deal.owner(tokens)
        counts = np.bincount(owner, minlength=deal.ranks)
        order = np.argsort(owner, kind="stable")
        turn = np.empty_like(order)
        turn[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        most = max(1, int(counts.max()))
        return cls(group, np.flatnonzero(owner == deal.rank), owner * most + turn, most)

    def on_all_ranks(self, values: Tensor) -> Tensor:
        """The numbers of all ranks, from the `values` of this one, in which every rank goes on alike."""
        return values if self.group is None else join(values, self.most, self.group)
