"""Floating-point operations that a model needs, given what its matrices and its attention cost.

A matrix product of [m, k] and [k, n] counts 2 m k n. Per token every weight matrix costs two
operations per element (of the experts, the share that is active); attention costs 4 · heads ·
head_dim per pair of a query and a key it sees, half of all pairs under a causal mask, fewer under a
sliding window. Training costs three forward passes: the backward pass computes two products for
each one of the forward. Recomputation is not counted: these are the operations of the model, not of
an implementation (PaLM, arXiv 2204.02311, appendix B). Norms, activations, softmax and embedding
look-ups are left out. So is where the numbers come from: `burnish.models.counting` reads them off a model,
`burnish.planning.shape` off a config.json, without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
"""Numbers, shape [N]."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """What pairs of tokens cost in one layer."""

    per_pair: int
    """Operations per pair of query and key: 2 · heads · (query width + value width)."""
    window: int | None
    """Most keys a query sees, itself included; None: all before it."""


@dataclass(frozen=True)
class ModelFlops:
    """The coefficients of a model's cost; made once, then cheap to ask."""

    per_token: float
    """Operations of all weight matrices, output layer included, for one token, forward."""
    attention: tuple[AttentionCost, ...]
    """One entry per attention layer."""

    def each(self, lengths: npt.ArrayLike) -> Floats:
        """Operations of one forward pass over each sequence, by its length in tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        cost = self.per_token * tokens
        for window, per_pair in self._per_pair.items():
            cost += per_pair * _pairs(tokens, window)
        return cost

    def forward(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths, in tokens."""
        return float(self.each(list(lengths)).sum())

    def training(self, lengths: Iterable[int], *, frozen: bool = False) -> float:
        """Operations of forward and backward; with `frozen`, of a model whose weights get no gradients (an adapter's)."""
        lengths = list(lengths)
        spared = self.per_token * sum(lengths) if frozen else 0.0
        return 3.0 * self.forward(lengths) - spared

    @cached_property
    def _per_pair(self) -> dict[int | None, int]:
        """Operations per pair, over all layers with the same window."""
        total: dict[int | None, int] = {}
        for cost in self.attention:
            total[cost.window] = total.get(cost.window, 0) + cost.per_pair
        return total


def pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one it sees: itself and those before it, at most `window` in all."""
    return int(_pairs(np.array([length], dtype=np.float64), window)[0])


def _pairs(lengths: Floats, window: int | None) -> Floats:
    within = lengths if window is None else np.minimum(lengths, window)
    return within * (within + 1) / 2 + (lengths - within) * within
