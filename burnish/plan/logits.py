"""Bytes of the logits of a micro-batch, which exist chunk by chunk (`burnish.models.logprobs`)."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.plan.model import Model

_FP32 = 4
_SUMMED_ROWS = 2048
"""Rows of the output layer whose gradient is added up at one time."""
_CPU_PIECE = 2 << 20
"""Bytes of a chunk that a CPU takes to fp32 at one time."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Of one process."""

    model: Model
    """The model."""
    scored: float
    """Predictions of the micro-batch."""
    most: int
    """Predictions of a chunk."""

    @property
    def forward(self) -> float:
        """A chunk of logits and its fp32 passes."""
        return self._chunk * self.model.bytes + self._exact(2)

    @property
    def backward(self) -> float:
        """The same, and the gradient of the output layer, which several chunks add up in fp32, some rows at a time."""
        width, head = self.model.bytes, self._weights
        logits = width * self._chunk
        if not self._several:
            return logits + max(self._exact(2), width * head)
        rows = min(1.0, _SUMMED_ROWS / self._words) * head
        summing = logits + max(self._exact(2), width * rows)
        converted = width * head if width != _FP32 else 0.0
        return _FP32 * head + max(summing, converted)

    def _exact(self, copies: int) -> float:
        """Bytes of so many fp32 copies of a chunk, of which a CPU has a small piece at a time."""
        size = _FP32 * self._chunk
        return copies * (min(size, _CPU_PIECE) if self.model.cpu else size)

    @property
    def gradient(self) -> float:
        """The gradient of the output layer, when it is whole."""
        return self.model.bytes * self._weights

    @property
    def _several(self) -> bool:
        return self.scored > self.most

    @property
    def _words(self) -> float:
        """Words whose logits this process computes."""
        return self.model.shape.outputs / self.model.tensor

    @property
    def _chunk(self) -> float:
        """Logits of one chunk, elements."""
        return min(self.most, self.scored) * self._words

    @property
    def _weights(self) -> float:
        """Elements of the output layer that are trained."""
        return self._words * self.model.shape.hidden * int(self.model.lora is None)
