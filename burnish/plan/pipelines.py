"""Which layers the stages of a pipeline have, and how many micro-batches are in flight.

What follows from the order of a model's layers alone; a large run has thousands of layouts, which ask for few
different pipelines, so each answer is kept. Left out: what a layer holds (`burnish.plan.megatron_model`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import le

Flight = tuple[int, ...]
"""Micro-batches that wait for their backward pass, of each chunk of a stage."""


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


class Pipelines:
    """All pipelines of a model."""

    def __init__(self, order: Sequence[int]) -> None:
        """`order` is the kind of each layer (`burnish.plan.shape.PlannedModel.order`)."""
        self._order = order
        self._stages: dict[tuple[int, int], list[Stage]] = {}
        self._fullest: dict[tuple[object, ...], list[Stage]] = {}
        self._flights: dict[tuple[Stage, int], list[Flight]] = {}

    def stages(self, ranks: int, virtual: int) -> list[Stage]:
        """All stages of one."""
        key = ranks, virtual
        if key not in self._stages:
            self._stages[key] = list(_stages(self._order, ranks, virtual))
        return self._stages[key]

    def fullest(self, ranks: int, virtual: int, beside: Sequence[Pipelines]) -> list[Stage]:
        """Those that can be the fullest, of a model and those beside it: the last, and those before which none has as many layers of each; earlier ones have more in flight."""
        key = ranks, virtual, *beside
        if key not in self._fullest:
            stages = [each.stages(ranks, virtual) for each in (self, *beside)]
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

    def flights(self, stage: Stage, microbatches: int) -> list[Flight]:
        """What is in flight when a backward pass begins and no other time has more of every chunk."""
        key = stage, microbatches
        if key not in self._flights:
            found: list[Flight] = []
            for each in _flights(*key):
                if not any(all(map(le, each, other)) for other in found):
                    found = [o for o in found if not all(map(le, o, each))] + [each]
            self._flights[key] = found
        return self._flights[key]


def _stages(order: Sequence[int], ranks: int, virtual: int) -> Iterator[Stage]:
    """Layers are dealt as `burnish.engines.megatron.meta_init.pipeline_layout` deals them."""
    each, over = divmod(len(order), ranks * virtual)
    starts = [each * chunk + min(chunk, over) for chunk in range(ranks * virtual + 1)]
    runs = [order[start:end] for start, end in pairwise(starts)]
    for number in range(ranks):
        chunks = tuple(map(Counter, runs[number::ranks]))
        yield Stage(number, ranks, chunks, sum(chunks, Counter()))


def _flights(stage: Stage, microbatches: int) -> Iterator[Flight]:
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
        begun, done = real[: before + 1 + ended], real[:ended]
        yield tuple(begun.count(chunk) - done.count(chunks - 1 - chunk) for chunk in range(chunks))
