"""Count a model's floating-point operations, without torch.

A product of [m, k] and [k, n] counts 2 m k n. Only active experts count. Training costs three
forward passes. As in PaLM (arXiv 2204.02311, appendix B), recomputation does not count. Nor do norms,
activations, softmax, embeddings, states, later copies of a shared beginning, and the output layer for
unscored tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Passed:
    """Counts of tokens that went through a model."""

    tokens: int = 0
    """Tokens through the layers' matrices; a shared beginning of sequences counts once (`burnish.models.packing`)."""
    predictions: int = 0
    """Tokens through the output layer."""
    attended: tuple[int, ...] = ()
    """Tokens of each sequence that attention saw."""
    begun: tuple[int, ...] = ()
    """How many of them had no queries here, because another sequence shares them; empty: none."""

    @classmethod
    def all_of(cls, lengths: Iterable[int]) -> Self:
        """Count sequences of these lengths, computed entirely."""
        attended = tuple(lengths)
        return cls(sum(attended), sum(attended), attended)

    def __add__(self, other: Passed) -> Passed:
        return Passed(
            self.tokens + other.tokens,
            self.predictions + other.predictions,
            self.attended + other.attended,
            self.begun + other.begun,
        )


@dataclass(frozen=True)
class ModelFlops:
    """The coefficients of a model's cost."""

    per_token: float
    """Operations of all weight matrices, output layer included, for one token, forward."""
    attention: Mapping[int | None, int]
    """By window: operations per pair of query and key, summed over the layers that have this window.

    One layer costs 2 · heads · (query width + value width). A query sees as many keys as the window, itself included; None: all before it.
    """
    head: float = 0.0
    """The output layer's share of `per_token`, which unscored tokens do not cost."""
    parameters: int = 0
    """Elements of all parameters."""

    def each(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the operations over each sequence of these lengths."""
        return self.per_token * lengths + self._attention(lengths)

    def forward(self, lengths: Iterable[int]) -> float:
        """Return the operations of one forward pass over sequences."""
        return float(sum(self.per_token * length + self._attention(length) for length in lengths))

    def training(self, passed: Passed, *, frozen: bool = False) -> float:
        """Return the operations of forward and backward; with `frozen`, weights get no gradients."""
        costs = self.of_training(frozen=frozen)
        products = costs.per_token * passed.tokens
        products -= costs.head * (passed.tokens - passed.predictions)
        products += sum(costs._attention(length) for length in passed.attended)
        return float(products - sum(costs._attention(length) for length in passed.begun))

    def of_training(self, *, frozen: bool = False) -> Self:
        """Return the coefficients of `training`."""
        products = 2.0 if frozen else 3.0
        attention = {window: 3 * cost for window, cost in self.attention.items()}
        return replace(
            self,
            per_token=products * self.per_token,
            attention=attention,
            head=products * self.head,
        )

    def _attention(self, lengths: Any) -> Any:
        return sum(float(each) * pairs(lengths, window) for window, each in self.attention.items())


def pairs(length: Any, window: int | None) -> Any:
    """Count pairs of a token and one it sees: at most `window`, itself included."""
    if window is None:
        return length * (length + 1) // 2
    within = (length + window - abs(length - window)) // 2  # min(length, window), also for an array
    return within * (within + 1) // 2 + (length - within) * within
