"""Sample from a copy of the model inside the training process.

Every process holds the whole model in the compute dtype and generates its own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch

from burnish.boxes.shards import Publication, TensorSpec
from burnish.config.schema import MOST_SLOTS
from burnish.distributed.device import free_memory
from burnish.distributed.layout import Layout
from burnish.records import Floats, Request
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.decoding import Decoding, SlotPrompt, SlotSequence, slot_bytes
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.stopping import Decode, StopRule
from burnish.rollout.running import LocalGenerator

# Share of free memory for the cache. Prefill and fragmentation take the rest.
_SHARE_OF_FREE_MEMORY = 0.8


class BuiltinGenerator(LocalGenerator[SlotSequence]):
    """Decode at most `slots` completions at once; "auto": as memory allows."""

    def __init__(
        self,
        model: InferenceModel,
        *,
        layout: Layout,
        slots: int | Literal["auto"],
        eos_token_ids: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        super().__init__(eos_token_ids, decode, model.max_positions)
        self._model = model
        self._layout, self._slots = layout, slots
        self._slot_bytes: tuple[int, int] | None = None

    def _maker(self, request: Request) -> Callable[..., SlotSequence]:
        return partial(SlotSequence, prompt=SlotPrompt(request.token_ids))

    @torch.inference_mode()
    def _complete(
        self,
        running: Sequence[SlotSequence],
        sampling: Sampling,
        rule: StopRule,
        watch: Watch | None,
    ) -> None:
        slots = self._slots
        if slots == "auto":
            longest = max((len(each.prompt.token_ids) for each in running), default=0)
            slots = self._slots_that_fit(longest + sampling.max_tokens)
        decoding = Decoding(self._model, running, sampling, rule, slots)
        decoding.run(lambda: self._version or 0, watch)

    def _logprobs(self, each: SlotSequence) -> tuple[Floats, Floats]:
        return np.array(each.sampled_logprobs, np.float32), np.array(each.logprobs, np.float32)

    def load_weights(self, weights: Publication, version: int) -> None:
        """See `InferenceModel.load`."""
        self._model.load(weights, self._layout)
        self._version = version

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`."""
        for shard in self._model.shards():
            yield shard.spec, shard.checksum()

    def release(self) -> None:
        """See `Generator.release`. Keeps a CPU's memory, and a model beside an adapter."""
        if self._model.device.type != "cpu" and self._model.release():
            self._version = None

    def close(self) -> None:
        """Free the weights for good."""
        self._version = None
        del self._model

    def _slots_that_fit(self, length: int) -> int:
        """Return how many sequences of `length` tokens fit: 512, halved until they do.

        Only powers of two, so that a restart computes the same bits.
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
