"""Bytes of the logits of a micro-batch, which exist chunk by chunk (`burnish.models.logprobs`)."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.planning.model import Model

_FP32 = 4


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
        """A chunk of logits beside the one before it, and its fp32 passes."""
        exact = 0 if self.model.cpu else (3 if self._several else 2) * _FP32
        return self._chunk * (self.model.bytes * (2 if self._several else 1) + exact)

    @property
    def backward(self) -> float:
        """The same, and the gradient of the output layer that is added up in fp32."""
        width, head = self.model.bytes, self._weights
        exact = 0 if self.model.cpu else 2 * _FP32
        if not self._several:
            return self._chunk * (width + exact) + width * head
        summing = self._chunk * (width + exact) + (_FP32 + width) * head
        return max(summing, self._chunk * 2 * width + _FP32 * head)

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
