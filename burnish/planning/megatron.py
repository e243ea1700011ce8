"""Bytes that one process of the Megatron engine needs in each phase of a step, in closed form.

As `burnish.planning.memory`, which says what is the same for both engines: generating, publishing, saving. Each stage of
a pipeline has its own needs, for the first has the embedding and most micro-batches in flight, the last the output layer;
what is planned for is the fullest. Gradients are added up in a buffer of all parameters, in fp32, that is
always there; the optimizer's fp32 weights and moments are divided among data-parallel processes. Left out: how unevenly
tokens fall on experts, and buffers of the communication library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from burnish.config.schema import RunConfig
from burnish.planning.megatron_layer import Cut, megatron_passes
from burnish.planning.memory import Needs, Parts
from burnish.planning.model import Model
from burnish.planning.shape import Layer, Weight
from burnish.planning.share import Layout
from burnish.planning.slots import WAVE
from burnish.planning.tape import Passes
from burnish.planning.workload import Workload

_FP32 = 4
_MOMENTS = 2


class MegatronNeeds:
    """What the fullest process of a run needs, of a model, at a layout."""

    def __init__(self, model: Model, config: RunConfig, work: Workload, layout: Layout) -> None:
        shape, cut = model.shape, Cut.of(config.engine)
        again = config.engine.activation_checkpointing == "selective"
        passes = [
            megatron_passes(shape.family, layer, model.arithmetic, cut, attends_again=again)
            for layer, _ in shape.layers
        ]
        self._stages = [
            _StageNeeds(model, config, work, layout, stage)
            for stage in _stages(shape.order, layout.pipeline, config, passes)
        ]

    def phases(self) -> dict[str, Parts]:
        """The parts of the fullest moment of each phase on the stage that needs most in it."""
        of_stages = [stage.phases() for stage in self._stages]
        return {
            phase: max((phases[phase] for phases in of_stages), key=_total)
            for phase in of_stages[0]
        }

    def host(self) -> Parts:
        """Bytes of host memory beside a device, of the stage that needs most."""
        return max((stage.host() for stage in self._stages), key=_total)

    @property
    def microbatches(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._stages[0].microbatches


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of the pipeline."""

    number: int
    """0-based."""
    chunks: tuple[tuple[int, ...], ...]
    """Of which kind its layers are (`ModelShape.order`); several runs of them where stages are virtual."""
    passes: Sequence[Passes]
    """What each kind of layer holds."""


class _StageNeeds(Needs):
    """What one process of a pipeline stage needs."""

    def __init__(
        self, model: Model, config: RunConfig, work: Workload, layout: Layout, stage: _Stage
    ) -> None:
        super().__init__(model, config, work, layout)
        self._stage, self._passes = stage.number, stage.passes
        self._is_first, self._is_last = stage.number == 0, stage.number == layout.pipeline - 1
        self._cut = Cut.of(config.engine)
        self._chunks, self._kinds = stage.chunks, [layer for layer, _ in model.shape.layers]
        self._counts = Counter(chain(*stage.chunks))

    def staging(self) -> float:
        """Bytes of host memory that a save in the background copies: fp32 weights and moments."""
        return _FP32 * (1 + _MOMENTS) * self._stepped * int(self._config.checkpoint.background)

    @cached_property
    def _held(self) -> tuple[float, float]:
        """Elements of this process's parameters: of experts, and all others."""
        experts = 0.0
        cut = self._layout.tensor
        others = float(_elements(self._outside, cut))
        for kind, count in self._counts.items():
            weights = self._kinds[kind].weights
            experts += count * sum(weight.elements for weight in weights if weight.width)
            others += count * _elements((weight for weight in weights if not weight.width), cut)
        return experts / (self._cut.expert_parallel * self._cut.expert_tensor), others

    @property
    def _outside(self) -> list[Weight]:
        """What this stage has outside the layers."""
        shape = self._model.shape
        table, norm = shape.root[0], shape.root[1]
        alone = self._layout.pipeline == 1
        weights = [table] if self._is_first else []
        weights += [norm] if self._is_last else []
        return weights + ([table] if self._is_last and not (shape.tied and alone) else [])

    @cached_property
    def _stepped(self) -> float:
        """Elements that this process's optimizer steps."""
        experts, others = self._held
        cut = self._cut.expert_parallel * self._cut.expert_tensor
        ranks = self._layout.world / self._layout.pipeline
        return experts / (ranks / cut) + others / self._layout.shards

    @cached_property
    def _state(self) -> Parts:
        """Weights in the dtype of computing, the buffer of gradients, fp32 weights where that is another, moments that do not rest on the host."""
        held = sum(self._held)
        exact = 0 if self._model.bytes == _FP32 else 1
        return {
            "weights": self._model.bytes * held,
            "gradients": _FP32 * held,
            "optimizer": _FP32 * exact * self._stepped + self._moments - self._slots_away,
        }

    @property
    def _moments(self) -> float:
        """Bytes of the optimizer's moments."""
        return _FP32 * _MOMENTS * self._stepped

    @property
    def _slots_away(self) -> float:
        return self._moments if self._slots.offloaded else 0.0

    @property
    def _reference(self) -> float:
        """Bytes of the reference's weights, in the dtype of computing."""
        return self._model.bytes * sum(self._held) if self._work.reference else 0.0

    @property
    def _left(self) -> float:
        return 0.0

    @property
    def _buffer(self) -> float:
        """Bytes of the buffer that tokens of all tensor ranks are gathered into, which stays."""
        return self.tokens * self._model.hidden if self._cut.scattered else 0.0

    @property
    def _hidden(self) -> float:
        """Bytes of the hidden states between layers."""
        ranks = self._layout.tensor if self._cut.scattered else 1
        return self.tokens * self._model.hidden / ranks

    @cached_property
    def _of_layer(self) -> list[float]:
        """Bytes that a layer of each kind keeps for the backward pass, of a micro-batch."""
        if self._checkpointing == "full":
            return [self._hidden] * len(self._kinds)
        return [self.tokens * passes.kept for passes in self._passes]

    def _of_chunk(self, chunk: int) -> float:
        """The same of one of its runs of layers."""
        return sum(self._of_layer[kind] for kind in self._chunks[chunk])

    def _flying(self) -> Iterator[Counter[int]]:
        """Micro-batches of each chunk that wait for their backward pass, each time that one begins.

        Every stage runs some forward passes ahead, then one of each in turn (1F1B); chunks take turns of as many
        micro-batches as there are stages.
        """
        ranks, chunks = self._layout.pipeline, len(self._chunks)
        before = ranks - self._stage - 1
        if chunks > 1:
            before = 2 * before + (chunks - 1) * ranks
        real = [
            number // ranks % chunks
            for number in range(-(-self.microbatches // ranks) * ranks * chunks)
            if number // (ranks * chunks) * ranks + number % ranks < self.microbatches
        ]
        for ended in range(min(len(real), ranks * chunks)):
            done = Counter(chunks - 1 - chunk for chunk in real[:ended])
            yield Counter(real[: before + 1 + ended]) - done

    @cached_property
    def _waiting_all(self) -> float:
        """Bytes that layers keep when that is most, and the sines and cosines that they share."""
        angles = 2 * _FP32 * self.tokens * self._kinds[0].query / self._kinds[0].heads
        kept = [self._of_chunk(chunk) + angles for chunk in range(len(self._chunks))]
        return max(
            sum(kept[chunk] * count for chunk, count in flying.items()) for flying in self._flying()
        )

    def _scoring(self) -> Parts:
        """A forward pass of which nothing is kept."""
        inference = max(passes.inference for passes in self._passes)
        scored = self._scored * self._model.hidden
        return {
            "gathered": self._buffer,
            "activations": self.tokens * inference + self._hidden + scored,
            "logits": self._logits.forward if self._is_last else 0.0,
        }

    def _updates(self) -> Iterator[Parts]:
        """The moments of forward, backward and optimizer step that can be the fullest."""
        shape, waiting = self._model.shape, self._waiting_all
        tied = self._logits.gradient if shape.tied and self._layout.pipeline == 1 else 0.0
        if self._is_last:
            last = self.tokens * self._model.hidden + 4 * self._scored * self._model.hidden
            yield self._at(waiting + last, 0.0, max(self._logits.forward, self._logits.backward))
        for kind in self._counts:
            weights = _single(self._kinds[kind])
            widest = max(_elements([weight], self._layout.tensor) for weight in weights)
            inner = self.tokens * max(moment.tokens for moment in self._passes[kind].backward)
            beside = waiting - self._of_layer[kind]
            yield self._at(beside + inner, tied + self._model.bytes * widest)
        if self._is_first:
            table = self._model.bytes * _elements([shape.root[0]], self._layout.tensor)
            again = 2 * self._hidden
            beside = waiting - self._of_chunk(0)
            yield self._at(beside + again, tied + table)
        yield self._at(0.0, 0.0) | {"optimizer step": self._stepping}

    def _at(self, activations: float, gradients: float, logits: float = 0.0) -> Parts:
        """A moment; `gradients` are bytes of those that are not in the buffer yet."""
        return {
            "gradients": self._state["gradients"] + gradients,
            "gathered": self._buffer,
            "activations": activations,
            "logits": logits,
        }

    @property
    def _stepping(self) -> float:
        """Bytes of temporaries of torch's AdamW: of one weight on CPUs, of all that are stepped together elsewhere; and moments that come from the host."""
        inside = (_single(self._kinds[kind]) for kind in self._counts)
        weights = [*self._outside, *chain(*inside)]
        widest = max(_elements([weight], self._layout.tensor) for weight in weights)
        alone = min(widest, self._stepped)
        wave = min(self._slots_away, max(WAVE, _FP32 * _MOMENTS * alone))
        if self._model.cpu:
            return wave + 2.0 * _FP32 * alone
        return wave + (wave / _MOMENTS if wave else _FP32 * self._stepped)

    def _publishing(self) -> Parts:
        others = 1 - 1 / (self._layout.tensor * self._layout.pipeline * self._cut.expert_parallel)
        return self._sent(self._model.bytes * self._model.shape.elements * others)


def _total(parts: Parts) -> float:
    return sum(parts.values())


def _elements(weights: Iterable[Weight], tensor: int) -> int:
    """Of dense weights, as tensor ranks share them."""
    return sum(-(-w.elements // tensor) if w.shared else w.elements for w in weights)


def _single(layer: Layer) -> Iterator[Weight]:
    """A layer's weights, of experts each one by itself."""
    for weight in layer.weights:
        yield Weight(weight.columns // weight.width, weight.width) if weight.width else weight


def _stages(
    order: Sequence[int], ranks: int, config: RunConfig, passes: Sequence[Passes]
) -> Iterator[_Stage]:
    """The stages that can be the fullest: the last, and of those with the same layers the first, which has most in flight.

    Layers are dealt as `burnish.engines.megatron.building.pipeline_layout` deals them.
    """
    count = ranks * config.engine.virtual_stages
    each, over = divmod(len(order), count)
    starts = [each * chunk + min(chunk, over) for chunk in range(count + 1)]
    runs = [tuple(order[start:end]) for start, end in pairwise(starts)]
    seen = set()
    for number in range(ranks):
        chunks = tuple(runs[number::ranks])
        if chunks not in seen or number == ranks - 1:
            yield _Stage(number, chunks, passes)
        seen.add(chunks)
