"""Bytes of the optimizer's state on one process: where they rest, and what a step needs beside them.

As `burnish.engines.optim.optimizer` has it. Left out: temporaries of AdamW, which has none, and of single matrices in Muon.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from burnish.config.schema import LoraConfig, RunConfig
from burnish.plan.shape import Weight
from burnish.plan.share import Share

_FP32 = 4
_BF16 = 2
_MOMENTS = 2
"""Numbers that AdamW keeps per weight; Muon keeps one of each matrix of the layers."""
_SENT = 64 << 20
"""Bytes that Muon sends at one time, and receives as much."""
WAVE = 256 << 20
"""Bytes of AdamW's slots that are on the device in fp32 at one time where they rest on the host or in bf16, or one weight's."""
_CHUNK = 1 << 22
"""Elements with moments of 8 bits that are updated at one time."""
_TEMPORARIES = 10 * _FP32
"""Bytes of temporaries of each."""


class Slots:
    """The state of what is trained: a model, or its adapter."""

    def __init__(self, share: Share, config: RunConfig, lora: LoraConfig | None) -> None:
        self._share, self._lora, self._kind = share, lora, config.optim.kind
        self.offloaded = config.engine.optimizer_offload
        """Whether it rests on the host."""
        self.width = _BF16 if config.optim.moments == "bf16" else _FP32
        """Bytes of a number of AdamW's between steps."""
        self.rests = self.offloaded or self.width != _FP32
        """Whether AdamW's comes to the device in fp32 for a step."""

    @cached_property
    def held(self) -> int:
        """Elements of what is trained."""
        return sum(self._share.held([weight]) * n for weight, _, n in self._weights())

    @cached_property
    def bytes(self) -> float:
        """All of it, wherever it rests."""
        return sum(self._of(weight, inside) * n for weight, inside, n in self._weights())

    def steps(self) -> Iterator[dict[str, float]]:
        """What moments of a step need beside weights, gradients and what rests on the device."""
        weights, muon = list(self._weights()), self._kind == "muon"
        if self.rests:
            slots = [
                (_MOMENTS * _FP32 * self._share.held([weight]), n)
                for weight, inside, n in weights
                if not (muon and inside and weight.columns > 1)
            ]
            largest = max((size for size, _ in slots), default=0)
            wave = min(sum(size * n for size, n in slots), max(WAVE, largest))
            yield {"optimizer step": float(wave)}
        if self._kind == "adamw8bit":
            largest = max(self._share.held([w]) for w, _, _ in weights if w.columns > 1)
            yield {"optimizer step": float(_TEMPORARIES * min(_CHUNK, largest))}
        if muon and self._lora is None:
            yield self._orthogonalizing()

    def _orthogonalizing(self) -> dict[str, float]:
        """Directions of all matrices in bf16, the whole ones that this process makes orthogonal, what is on its way to it."""
        matrices = [
            (weight, n)
            for layer, n in self._share.shape.layers
            for weight in layer.weights
            if weight.columns > 1
        ]
        world = self._share.layout.world
        whole = sum(weight.elements * n for weight, n in matrices)
        passing = _BF16 * self._share.matrices if world > 1 else 0
        parts = {"muon": _BF16 * (self._share.matrices + whole / world) + 2 * min(_SENT, passing)}
        if self.offloaded:  # the momentum of one matrix
            parts["optimizer step"] = float(
                _FP32 * max(self._share.held([weight]) for weight, _ in matrices)
            )
        return parts

    def _weights(self) -> Iterator[tuple[Weight, bool, int]]:
        """What is trained, whether it is inside a layer, and how often."""
        shape = self._share.shape
        for layer, n in shape.layers:
            if self._lora is None:
                yield from ((weight, True, n) for weight in layer.weights)
            else:
                yield from ((weight, True, n) for weight in layer.adapter(self._lora))
        if self._lora is None:
            yield from ((weight, False, 1) for weight in shape.root)

    def _of(self, weight: Weight, inside: bool) -> float:
        """Bytes of one weight's slots."""
        held = self._share.held([weight])
        if weight.columns == 1 or self._kind == "adamw":
            return _MOMENTS * self.width * held
        if self._kind == "muon":
            return _FP32 * held * (1 if inside else _MOMENTS)
        layout = self._share.layout
        return _MOMENTS * (held + _FP32 * weight.scales(layout.shards, layout.tensor))
