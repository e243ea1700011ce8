"""Sample from a copy of the model inside the training process.

Every process holds the whole model in the compute dtype and generates its own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from burnish.boxes.shards import Publication, TensorSpec
from burnish.config.schema import MOST_SLOTS
from burnish.distributed.device import free_memory
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.records import Completion, Request
from burnish.rollout.base import Sampling, Underway, Watch, require_valid
from burnish.rollout.builtin.decoding import Decoding, slot_bytes
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.stopping import Decode, StopRule

_SHARE_OF_FREE_MEMORY = 0.8
# The rest is for prompts that are read and for what the allocator loses.


class BuiltinGenerator:
    """A `Continuable` that decodes at most `slots` completions at once; "auto" is as many as memory holds.

    `eos_token_ids` end every completion. Stop strings need `decode`.
    """

    central = False

    def __init__(
        self,
        model: InferenceModel,
        *,
        layout: Layout,
        slots: int | Literal["auto"],
        eos_token_ids: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        self._model = model
        self._layout, self._slots = layout, slots
        self._eos_token_ids, self._decode = tuple(eos_token_ids), decode
        self._version: int | None = None
        self._slot_bytes: tuple[int, int] | None = None
        self._decoding: Decoding | None = None

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None = None,
        stream: Callable[[Sequence[int]], None] | None = None,
    ) -> list[list[Completion]]:
        """See `Generator.generate`; `stream` is as in `Decoding.run`.

        Raises `UsageError` before any work without weights, and as `require_valid` and `StopRule` do.
        """
        if self._version is None:
            raise UsageError("the generator has no weights", do="call load_weights first")
        require_valid(requests, sampling, self._model.max_positions)
        stop_rule = StopRule(sampling, self._eos_token_ids, self._decode)
        slots = self._slots
        if slots == "auto":
            longest = max((len(request.token_ids) for request in requests), default=0)
            slots = self._slots_that_fit(longest + sampling.max_tokens)
        self._decoding = Decoding(self._model, requests, sampling, stop_rule, slots)
        try:
            return self._decoding.run(lambda: self._version or 0, watch, stream)
        finally:
            self._decoding = None

    def so_far(self) -> list[Underway]:
        """See `Continuable.so_far`."""
        return [] if self._decoding is None else self._decoding.so_far()

    def load_weights(self, weights: Publication, version: int) -> None:
        """See `InferenceModel.load`."""
        self._model.load(weights, self._layout)
        self._version = version

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`."""
        for shard in self._model.shards():
            yield shard.spec, shard.checksum()

    def release(self) -> None:
        """See `Generator.release`. A CPU's memory, and a model beside an adapter, stay."""
        if self._model.device.type != "cpu" and self._model.release():
            self._version = None

    def close(self) -> None:
        """Free the weights for good."""
        self._version = None
        del self._model

    def _slots_that_fit(self, length: int) -> int:
        """Return 512, or half of that and so on, for sequences of so many tokens.

        Powers of two, so that a restart computes the same bits.
        """
        if self._slot_bytes is None:
            self._slot_bytes = slot_bytes(self._model)
        token, vocabulary = self._slot_bytes
        device = self._model.device
        here = self._layout.local_world if device.type == "cpu" else 1
        room = _SHARE_OF_FREE_MEMORY * free_memory(device) / here
        slots = MOST_SLOTS
        while slots > 1 and slots * (length * token + vocabulary) > room:
            slots //= 2
        return slots
