"""How many bytes a chain of operations holds at every moment, forward and backward.

Operations name the tensors that they read, make, and keep for the backward pass. A tensor lives until
nobody reads it any more and no operation that is still to be run backward keeps it; a gradient lives from
the operation that makes it to the one that made the tensor. That is all of autograd that memory depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

Sizes = dict[str, float]
"""Bytes per token, by the name of the tensor."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of autograd."""

    reads: tuple[str, ...]
    """Tensors that it takes; they get gradients."""
    makes: Sizes
    """Tensors that it gives."""
    keeps: tuple[str, ...] = ()
    """Which of both it keeps for its backward."""
    weight: int = 0
    """Elements of its parameters, whose gradients stay until the end."""
    scratch: float = 0.0
    """Bytes per token that it needs while it runs forward."""
    scratch_backward: float = 0.0
    """The same, backward."""
    product: bool = False
    """Whether selective checkpointing keeps what it makes."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held at one time."""

    tokens: float
    """Bytes per token."""
    weights: int
    """Elements of weight gradients."""


@dataclass(frozen=True, slots=True)
class Passes:
    """A chain of operations, run forward and backward."""

    kept: float
    """Bytes per token that stay between both, the chain's input not counted unless it is kept."""
    products: float
    """Bytes per token that selective checkpointing keeps between both, the chain's input included."""
    inference: float
    """The most bytes per token while running forward without a backward pass to come."""
    peak: float
    """The most bytes per token while running backward."""
    backward: tuple[Moment, ...]
    """Moments of the backward pass, those that no other exceeds; what is kept and not yet freed is in them."""


@dataclass(slots=True)
class Tape:
    """Collects operations."""

    operations: list[Operation] = field(default_factory=list)

    def add(
        self,
        reads: Sequence[str],
        makes: Sizes,
        keeps: Sequence[str] = (),
        *,
        weight: int = 0,
        scratch: float = 0.0,
        scratch_backward: float = 0.0,
        product: bool = False,
    ) -> None:
        """Append one; see `Operation`."""
        self.operations.append(
            Operation(tuple(reads), makes, tuple(keeps), weight, scratch, scratch_backward, product)
        )

    def run(self, inputs: Sizes) -> Passes:
        """What the chain holds; `inputs` come from outside, the first of them is what it continues."""
        sizes = inputs | {n: s for each in self.operations for n, s in each.makes.items()}
        kept = {name for each in self.operations for name in each.keeps}
        given = next(iter(inputs))
        products = {n for each in self.operations if each.product for n in each.makes} | {given}
        backward = _undominated(self._backward(sizes))
        return Passes(
            kept=sum(sizes[name] for name in kept),
            products=sum(sizes[name] for name in products),
            inference=self._forward(sizes),
            peak=backward[0].tokens,
            backward=backward,
        )

    def _forward(self, sizes: Sizes) -> float:
        last = {name: i for i, each in enumerate(self.operations) for name in each.reads}
        alive = set(self.operations[0].reads)
        most = 0.0
        for number, each in enumerate(self.operations):
            alive |= set(each.makes)
            most = max(most, sum(sizes[name] for name in alive) + each.scratch)
            alive -= {n for n in alive if last.get(n, len(last)) <= number}
        return most

    def _backward(self, sizes: Sizes) -> list[Moment]:
        keepers = Counter(name for each in self.operations for name in each.keeps)
        gradients = set(self.operations[-1].makes)
        weights, moments = 0, []
        for each in reversed(self.operations):
            flowing = gradients | set(each.reads)
            weights += each.weight
            held = sum(sizes[name] for name in keepers) + sum(sizes[name] for name in flowing)
            moments.append(Moment(held + each.scratch_backward, weights))
            gradients = flowing - set(each.makes)
            keepers -= Counter(each.keeps)
        return moments


def _undominated(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Those of which no other has both more."""
    best: list[Moment] = []
    for each in sorted(moments, key=lambda m: (-m.tokens, -m.weights)):
        if not best or each.weights > best[-1].weights:
            best.append(each)
    return tuple(best)
