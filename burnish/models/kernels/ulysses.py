"""Ulysses sequence parallelism: several ranks share the tokens of a micro-batch (arXiv 2309.14509).

Attention lies between two all-to-alls, `_all_tokens` and `_all_heads`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from burnish.distributed.tensor_collectives import all_gather_rows, all_to_all
from burnish.models.kernels.attention import Heads, Mixer, PackedAttention, Softmax
from burnish.models.packing import TokenSharing


@dataclass(frozen=True, slots=True, eq=False)
class Ulysses:
    """Attention for this rank's part of the tokens; an `PackedAttention`."""

    packing: PackedAttention
    """Attention for all tokens."""
    deal: TokenSharing

    def attend(self, layer: int, parts: Heads, softmax: Softmax) -> Tensor:
        """See `PackedAttention.attend`. Key heads are repeated if they are fewer than ranks. Collective."""
        query, key, value = parts
        times = _repeats(query.shape[1], key.shape[1], self.deal.ranks)
        if times > 1:
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
        whole = self._all_tokens(query), self._all_tokens(key), self._all_tokens(value)
        if softmax.sinks is not None:
            softmax = softmax._replace(
                sinks=softmax.sinks.view(self.deal.ranks, -1)[self.deal.rank]
            )
        return self._all_heads(self.packing.attend(layer, whole, softmax))

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """See `PackedAttention.mix`. Every rank computes all tokens, because a state has no parts, and keeps its own. Collective."""
        deal = self.deal
        rows = hidden[0]
        if deal.group is not None:
            gathered = all_gather_rows(rows, deal.group).view(deal.ranks, deal.rows, -1)
            rows = gathered.transpose(0, 1).flatten(0, 1)
        mixed = self.packing.mix(layer, mixer, rows[None, : deal.count])[0]
        own = mixed[deal.rank :: deal.ranks]
        return functional.pad(own, (0, 0, 0, deal.rows - len(own)))[None]

    def _all_tokens(self, heads: Tensor) -> Tensor:
        """Turn [1, heads, own tokens, d] into [1, own heads, all tokens, d]."""
        parts = heads[0].view(self.deal.ranks, -1, *heads.shape[2:]).transpose(1, 2)
        received = self._swap(parts)  # [ranks, own tokens, own heads, d]
        tokens = received.transpose(0, 1).flatten(0, 1)[: self.deal.count]
        return tokens.transpose(0, 1)[None]

    def _all_heads(self, output: Tensor) -> Tensor:
        """Turn [1, all tokens, own heads, d] into [1, own tokens, all heads, d]."""
        padding = self.deal.ranks * self.deal.rows - self.deal.count
        tokens = functional.pad(output[0], (0, 0, 0, 0, 0, padding))
        parts = tokens.view(-1, self.deal.ranks, *tokens.shape[1:]).transpose(0, 1)
        received = self._swap(parts)  # [ranks, own tokens, heads of that rank, d]
        return received.transpose(0, 1).flatten(1, 2)[None]

    def _swap(self, parts: Tensor) -> Tensor:
        return parts if self.deal.group is None else all_to_all(parts, self.deal.group)


def _repeats(heads: int, key_heads: int, ranks: int) -> int:
    """Return the fewest repeats that give every rank whole key heads."""
    sharing = heads // key_heads
    return next(
        times
        for times in range(1, sharing + 1)
        if sharing % times == 0 and key_heads * times % ranks == 0
    )
