"""Sample from a copy of the model inside the training process.

Every process holds the whole model in the compute dtype and generates its own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from burnish.boxes.shards import Publication, TensorSpec
from burnish.config.schema import LoraConfig
from burnish.distributed.device import free_memory, has_matrix_units, is_sm80_or_newer
from burnish.distributed.layout import Layout
from burnish.records import Floats, Request
from burnish.rollout.base import Decode, Sampling, Watch
from burnish.rollout.builtin.decoding import Decoding, SlotPrompt, SlotSequence, slots_that_fit
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.kv_cache import PromptCache, SlotBytes
from burnish.rollout.running import LocalGenerator, StopRule

if TYPE_CHECKING:
    from burnish.rollout.builtin.turns import KeptTurns

# Share of free memory for the cache. Prefill and fragmentation take the rest.
_SHARE_OF_FREE_MEMORY = 0.8
# Sampling holds about this many copies of the logits.
_LOGIT_COPIES = 5


class BuiltinGenerator(LocalGenerator[SlotSequence]):
    """Decode at most `slots` completions at once; "auto": as memory allows."""

    def __init__(  # noqa: PLR0913
        self,
        hf_config: PretrainedConfig,
        *,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
        slots: int | Literal["auto"],
        eos_token_ids: Sequence[int],
        decode: Decode | None = None,
        max_length: int | None = None,
        experts: bool = True,
        lora: LoraConfig | None = None,
    ) -> None:
        """See `Generator`. Raises `IncompatibleError` if it cannot build the model, or layers of `lora` are missing."""
        self._model = InferenceModel(hf_config, device=device, dtype=dtype, lora=lora)
        limits = (max_length, self._model.max_positions)
        super().__init__(
            eos_token_ids, decode, min(filter(None, limits), default=None), experts=experts
        )
        self._layout = layout
        self._slots = slots
        self._turns: KeptTurns | None = None
        """What is kept of conversations, with `Sampling.keeps`."""

    @property
    def module(self) -> PreTrainedModel:
        """transformers' model, with packed attention."""
        return self._model.module

    def _maker(self, request: Request) -> Callable[..., SlotSequence]:
        key = (request.prompt_key, request.first_sample)
        return partial(SlotSequence, prompt=SlotPrompt(request.token_ids, key))

    @torch.inference_mode()
    def _complete(
        self,
        running: Sequence[SlotSequence],
        sampling: Sampling,
        rule: StopRule,
        watch: Watch | None,
    ) -> None:
        if not sampling.keeps:
            self.forget()
        slots = self._slots
        longest = max((len(each.prompt.token_ids) + each.room for each in running), default=0)
        make: Callable[..., Decoding] = Decoding
        most_kept: int | None = None
        if is_sm80_or_newer(self._model.device):
            from burnish.rollout.builtin.paged_decoding import choose_decoding

            # Turns that follow are longer.
            longest = self._max_positions or longest if self._following else longest
            sizes = (slots, longest, len(running), sampling)
            make, slots, most_kept = choose_decoding(self._room(), self._slot_bytes, *sizes)
        if slots == "auto":
            slots = slots_that_fit(self._room(), self._slot_bytes, longest, keeps=sampling.keeps)
        if sampling.keeps:
            from burnish.rollout.builtin.turns import KeptTurns

            self._turns = self._turns or KeptTurns()
            self._turns.begin(running, most_kept or slots * longest)
        decoding = make(self._model, running, sampling, rule, slots, self._turns)
        decoding.run(lambda: self._version or 0, watch, self._following)

    def _logprobs(self, running: SlotSequence) -> tuple[Floats, Floats]:
        fp32 = np.float32
        return np.array(running.sampled_logprobs, fp32), np.array(running.logprobs, fp32)

    def load_weights(self, weights: Publication, version: int) -> None:
        """See `InferenceModel.load`."""
        self.forget()
        self._model.load(weights, self._layout)
        self._version = version

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`."""
        for shard in self._model.shards():
            yield shard.spec, shard.checksum()

    def release(self) -> None:
        """See `Generator.release`. Keeps a CPU's memory, and a model beside an adapter."""
        self.forget()
        if self._model.device.type != "cpu" and self._model.release():
            self._version = None

    def forget(self) -> None:
        """See `Generator.forget`."""
        self._turns = None

    def close(self) -> None:
        """Free the weights for good."""
        self.forget()
        self._version = None
        del self._model

    @cached_property
    def _slot_bytes(self) -> SlotBytes:
        """Return a slot's bytes for each token, and for its logits and states. Reads one token, and returns its cache."""
        model = self._model
        cache = PromptCache([1], model.device)
        token = torch.zeros(1, dtype=torch.int64, device=model.device)
        hidden = model.forward(token, token, cache, None)
        parts = [part for layer in cache.layers.values() for part in layer]
        states = [part for layer in cache.states.values() for part in layer]
        is_wide = not has_matrix_units(model.device)  # `SharedCache` holds fp32
        per_token = sum(part.numel() * (4 if is_wide else part.element_size()) for part in parts)
        # A slot's states, and those of a prompt that is read ahead.
        fixed = _LOGIT_COPIES * model.logits(hidden).nbytes + 2 * sum(
            part.nbytes for part in states
        )
        return per_token, fixed, cache

    def _room(self) -> float:
        """Return the bytes that slots and what is kept of conversations may take."""
        device = self._model.device
        processes = self._layout.local_world if device.type == "cpu" else 1
        room = _SHARE_OF_FREE_MEMORY * free_memory(device) / processes
        return room + (self._turns.nbytes if self._turns else 0)
