"""A model as the stages of Megatron's pipelines hold it, for one arithmetic.

A large run has thousands of layouts, which differ in how experts and layers are divided and have most else in
common. That is here, each part of it computed the first time that a layout asks. Left out: what follows from a
single layout (`burnish.planning.megatron`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from burnish.planning.activations import Arithmetic
from burnish.planning.megatron_layer import Cut, megatron_passes
from burnish.planning.model import Model
from burnish.planning.shape import ModelShape, Weight
from burnish.planning.tape import Passes


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A stage of a pipeline."""

    number: int
    """0-based."""
    chunks: tuple[Counter[int], ...]
    """How many layers it has of each kind; several runs of layers where stages are virtual."""
    counts: Counter[int]
    """The same of all of them."""


class MegatronModel(Model):
    """A model's kinds of layers and what they hold; lists are by kind, in the order of `ModelShape.layers`."""

    def __init__(self, shape: ModelShape, arithmetic: Arithmetic) -> None:
        super().__init__(shape, arithmetic)
        self.kinds = [layer for layer, _ in shape.layers]
        self._passes: dict[tuple[object, ...], list[Passes]] = {}
        self._stages: dict[tuple[int, int], list[Stage]] = {}
        self._flights: dict[tuple[int, ...], list[Counter[int]]] = {}

    def passes(self, cut: Cut, *, attends_again: bool) -> list[Passes]:
        """What a layer of each kind holds of a token; `attends_again` as for `megatron_passes`."""
        ranks, experts = cut.expert_parallel, max(layer.experts for layer in self.kinds)
        # of the ranks that share experts it matters whether there are others, and whether each has one
        key = cut.scattered, cut.expert_tensor, ranks == 1, ranks >= experts, attends_again
        if key not in self._passes:
            self._passes[key] = [
                megatron_passes(
                    self.shape.family, layer, self.arithmetic, cut, attends_again=attends_again
                )
                for layer in self.kinds
            ]
        return self._passes[key]

    def stages(self, ranks: int, virtual: int) -> list[Stage]:
        """The stages that can be the fullest: the last, and of those with the same layers the first, which has most in flight."""
        key = ranks, virtual
        if key not in self._stages:
            self._stages[key] = list(_stages(self.shape.order, ranks, virtual))
        return self._stages[key]

    def flights(self, stage: Stage, ranks: int, microbatches: int) -> list[Counter[int]]:
        """Micro-batches of each chunk of a stage that wait for their backward pass, when one begins and no other time has more."""
        key = stage.number, ranks, len(stage.chunks), microbatches
        if key not in self._flights:
            found: list[Counter[int]] = []
            for each in _flights(*key):
                if not any(each <= other for other in found):
                    found = [*(other for other in found if not other <= each), each]
            self._flights[key] = found
        return self._flights[key]

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
    seen = set()
    for number in range(ranks):
        chunks = tuple(runs[number::ranks])
        if chunks not in seen or number == ranks - 1:
            yield Stage(number, tuple(map(Counter, chunks)), Counter(chain(*chunks)))
        seen.add(chunks)


def _flights(stage: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Counter[int]]:
    """Every stage runs some forward passes ahead, then one of each in turn (1F1B).

    Chunks take turns of as many micro-batches as there are stages.
    """
    before = ranks - stage - 1
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
