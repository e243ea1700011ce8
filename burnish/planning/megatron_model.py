"""A model as the stages of Megatron's pipelines hold it, for one arithmetic.

A large run has thousands of layouts, which differ in how experts and layers are divided and have most else in
common. That is here, each part of it computed the first time that a layout asks. Left out: what follows from a
single layout (`burnish.planning.megatron`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import le

from burnish.planning.activations import Arithmetic
from burnish.planning.megatron_layer import Cut, megatron_passes
from burnish.planning.model import Model
from burnish.planning.shape import ModelShape, Weight

_FP32 = 4


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A stage of a pipeline."""

    number: int
    """0-based."""
    ranks: int
    """How many the pipeline has."""
    chunks: tuple[Counter[int], ...]
    """How many layers it has of each kind; several runs of layers where stages are virtual."""
    counts: Counter[int]
    """The same of all of them."""


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


class MegatronModel(Model):
    """A model's kinds of layers and what they hold; lists are by kind, in the order of `ModelShape.layers`."""

    def __init__(self, shape: ModelShape, arithmetic: Arithmetic) -> None:
        super().__init__(shape, arithmetic)
        self.kinds = [layer for layer, _ in shape.layers]
        self._per_token: dict[tuple[object, ...], PerToken] = {}
        self._waiting: dict[tuple[PerToken, Stage, int], float] = {}
        self._stages: dict[tuple[int, int], list[Stage]] = {}
        self._fullest: dict[tuple[object, ...], list[Stage]] = {}
        self._flights: dict[tuple[Stage, int], list[Counter[int]]] = {}

    def per_token(self, cut: Cut, checkpointing: str) -> PerToken:
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

    def _measured(self, cut: Cut, *, attends_again: bool) -> PerToken:
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
            flights = self._most_in_flight(stage, microbatches)
            self._waiting[key] = max(
                sum(kept[chunk] * n for chunk, n in flight.items()) for flight in flights
            )
        return self._waiting[key]

    def stages(self, ranks: int, virtual: int) -> list[Stage]:
        """All stages of a pipeline."""
        key = ranks, virtual
        if key not in self._stages:
            self._stages[key] = list(_stages(self.shape.order, ranks, virtual))
        return self._stages[key]

    def fullest(self, ranks: int, virtual: int, beside: Sequence[MegatronModel]) -> list[Stage]:
        """Those that can be the fullest: the last, and those before which none has as many layers of each model; earlier ones have more in flight."""
        key = ranks, virtual, *beside
        if key not in self._fullest:
            stages = [model.stages(ranks, virtual) for model in (self, *beside)]
            chunks = [
                [chunk for stage in each for chunk in stage.chunks]
                for each in zip(*stages, strict=True)
            ]
            self._fullest[key] = [
                stage
                for stage, own in zip(stages[0], chunks, strict=True)
                if stage.number == ranks - 1
                or not any(all(map(le, own, others)) for others in chunks[: stage.number])
            ]
        return self._fullest[key]

    def _most_in_flight(self, stage: Stage, microbatches: int) -> list[Counter[int]]:
        """Micro-batches of each chunk of a stage that wait for their backward pass, when one begins and no other time has more."""
        key = stage, microbatches
        if key not in self._flights:
            found: list[Counter[int]] = []
            for each in _flights(*key):
                if not any(each <= other for other in found):
                    found = [*(other for other in found if not other <= each), each]
            self._flights[key] = found
        return self._flights[key]

    @cached_property
    def _most_experts(self) -> int:
        return max(layer.experts for layer in self.kinds)

    @cached_property
    def experts(self) -> list[int]:
        """Elements of the experts of a layer, all of them."""
        return [sum(w.elements for w in layer.weights if w.width) for layer in self.kinds]

    @cached_property
    def others(self) -> list[int]:
        """Elements of a layer's other weights on one tensor rank."""
        return [self.held(w for w in layer.weights if not w.width) for layer in self.kinds]

    @cached_property
    def widest(self) -> list[int]:
        """Elements of a layer's largest weight on one tensor rank, its experts left out."""
        return [max(self.held([w]) for w in layer.weights if not w.width) for layer in self.kinds]

    @cached_property
    def widest_of_experts(self) -> list[int]:
        """Elements of the larger matrix of all a layer's experts; 0 where it has none."""
        return [
            max((w.elements for w in layer.weights if w.width), default=0) for layer in self.kinds
        ]

    def held(self, weights: Iterable[Weight]) -> int:
        """Elements of weights on one tensor rank."""
        return sum(-(-w.elements // self.tensor) if w.shared else w.elements for w in weights)


def _stages(order: Sequence[int], ranks: int, virtual: int) -> Iterator[Stage]:
    """Layers are dealt as `burnish.engines.megatron.building.pipeline_layout` deals them."""
    each, over = divmod(len(order), ranks * virtual)
    starts = [each * chunk + min(chunk, over) for chunk in range(ranks * virtual + 1)]
    runs = [tuple(order[start:end]) for start, end in pairwise(starts)]
    for number in range(ranks):
        chunks = tuple(map(Counter, runs[number::ranks]))
        yield Stage(number, ranks, chunks, sum(chunks, Counter()))


def _flights(stage: Stage, microbatches: int) -> Iterator[Counter[int]]:
    """Every stage runs some forward passes ahead, then one of each in turn (1F1B).

    Chunks take turns of as many micro-batches as there are stages.
    """
    ranks, chunks = stage.ranks, len(stage.chunks)
    before = ranks - stage.number - 1
    if chunks > 1:
        before = 2 * before + (chunks - 1) * ranks
    real = [
        number // ranks % chunks
        for number in range(-(-microbatches // ranks) * ranks * chunks)
        if number // (ranks * chunks) * ranks + number % ranks < microbatches
    ]
    for ended in range(min(len(real), ranks * chunks)):
        done = Counter(chunks - 1 - chunk for chunk in real[:ended])
        yield Counter(real[: before + 1 + ended]) - done
