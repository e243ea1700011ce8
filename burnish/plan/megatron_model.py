"""A model as the stages of Megatron's pipelines hold it, for one arithmetic.

A large run has thousands of layouts, which differ in how experts and layers are divided and have most else in
common. That is here, each part of it computed the first time that a layout asks. Left out: what follows from a
single layout (`burnish.plan.megatron`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from burnish.plan.activations import Arithmetic
from burnish.plan.megatron_layer import LayerCut, megatron_passes
from burnish.plan.model import Model
from burnish.plan.pipelines import Stage
from burnish.plan.shape import PlannedModel, Weight

_FP32 = 4


@dataclass(frozen=True, slots=True, eq=False)
class PerToken:
    """Bytes of a token in layers that are divided in one way; lists are by kind of layer."""

    kept: list[float]
    """That a layer keeps for its backward pass."""
    peaks: list[float]
    """That a layer has while it runs backward, when that is most."""
    inference: float
    """That a layer has while nothing is kept, when that is most, in the kind that needs most."""
    hidden: float
    """Of the hidden state between layers."""

    def of(self, layers: Counter[int]) -> float:
        """That some layers keep."""
        return sum(self.kept[kind] * n for kind, n in layers.items())


@dataclass(frozen=True, slots=True)
class Holding:
    """Elements of a stage's weights on one tensor rank, where no other ranks share its experts."""

    experts: int
    """Of all experts."""
    others: int
    """Of all other weights."""
    widest: int
    """Of the largest weight but experts'."""
    widest_of_experts: int
    """Of the largest matrix of all a layer's experts; 0 where there are none."""


class MegatronModel(Model):
    """A model's kinds of layers and what they hold; lists are by kind, in the order of `PlannedModel.layers`."""

    def __init__(self, shape: PlannedModel, arithmetic: Arithmetic) -> None:
        super().__init__(shape, arithmetic)
        self.kinds = [layer for layer, _ in shape.layers]
        self._per_token: dict[tuple[object, ...], PerToken] = {}
        self._waiting: dict[tuple[PerToken, Stage, int], float] = {}
        self._holdings: dict[Stage, Holding] = {}

    def per_token(self, cut: LayerCut, checkpointing: str) -> PerToken:
        """What its layers hold of a token, with a kind of activation checkpointing."""
        ranks = cut.expert_parallel
        # of the ranks that share experts it matters whether there are others, and whether each has one
        several, divided = ranks > 1, ranks < self._most_experts
        key = cut.scattered, cut.expert_tensor, several, divided, checkpointing
        if key not in self._per_token:
            if checkpointing == "full":
                plain = self.per_token(cut, "none")
                found = replace(plain, kept=[plain.hidden] * len(plain.kept))
            else:
                found = self._measured(cut, attends_again=checkpointing == "selective")
            self._per_token[key] = found
        return self._per_token[key]

    def _measured(self, cut: LayerCut, *, attends_again: bool) -> PerToken:
        """The same of layers that keep what they compute; `attends_again` as for `megatron_passes`."""
        family, arithmetic = self.shape.family, self.arithmetic
        passes = [
            megatron_passes(family, layer, arithmetic, cut, attends_again=attends_again)
            for layer in self.kinds
        ]
        return PerToken(
            kept=[each.kept for each in passes],
            peaks=[each.peak for each in passes],
            inference=max(each.inference for each in passes),
            hidden=self.hidden / (self.tensor if cut.scattered else 1),
        )

    def waiting(self, held: PerToken, stage: Stage, microbatches: int) -> float:
        """Bytes of a token that a stage's layers keep when that is most, of all micro-batches in flight; and the sines and cosines that the layers of each share."""
        key = held, stage, microbatches
        if key not in self._waiting:
            some = self.kinds[0]
            angles = 2 * _FP32 * some.query / some.heads
            kept = [held.of(chunk) + angles for chunk in stage.chunks]
            flights = self.shape.pipelines.flights(stage, microbatches)
            self._waiting[key] = max(sum(map(mul, kept, flight)) for flight in flights)
        return self._waiting[key]

    @cached_property
    def _most_experts(self) -> int:
        return max(layer.experts for layer in self.kinds)

    def holding(self, stage: Stage) -> Holding:
        """What a stage holds."""
        if stage not in self._holdings:
            counts, outside = stage.counts, [self._held([w]) for w in self._outside(stage)]
            self._holdings[stage] = Holding(
                experts=sum(self._experts[kind] * n for kind, n in counts.items()),
                others=sum(self._others[kind] * n for kind, n in counts.items()) + sum(outside),
                widest=max([self.widest[kind] for kind in counts] + outside),
                widest_of_experts=max(self.widest_of_experts[kind] for kind in counts),
            )
        return self._holdings[stage]

    def _outside(self, stage: Stage) -> Iterator[Weight]:
        """What a stage has outside the layers."""
        shape, is_last = self.shape, stage.number == stage.ranks - 1
        table, norm = shape.root[0], shape.root[1]
        if stage.number == 0:
            yield table
        if is_last:
            yield norm
        if is_last and not shape.scores_values and not (shape.tied and stage.ranks == 1):
            yield table

    @cached_property
    def table(self) -> int:
        """Elements of the embedding on one tensor rank."""
        return self._held([self.shape.root[0]])

    @cached_property
    def _experts(self) -> list[int]:
        """Elements of the experts of a layer, all of them."""
        return [sum(w.elements for w in layer.weights if w.width) for layer in self.kinds]

    @cached_property
    def _others(self) -> list[int]:
        """Elements of a layer's other weights on one tensor rank."""
        return [self._held(w for w in layer.weights if not w.width) for layer in self.kinds]

    @cached_property
    def widest(self) -> list[int]:
        """Elements of a layer's largest weight on one tensor rank, its experts left out."""
        return [max(self._held([w]) for w in layer.weights if not w.width) for layer in self.kinds]

    @cached_property
    def widest_of_experts(self) -> list[int]:
        """Elements of the larger matrix of all a layer's experts; 0 where it has none."""
        return [
            max((w.elements for w in layer.weights if w.width), default=0) for layer in self.kinds
        ]

    def _held(self, weights: Iterable[Weight]) -> int:
        """Elements of weights on one tensor rank."""
        return sum(-(-w.elements // self.tensor) if w.shared else w.elements for w in weights)
