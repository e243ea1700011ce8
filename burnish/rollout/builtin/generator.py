"""The built-in generator: sample from a copy of the model inside the training process, on any device.

Each rank generates its own requests. The KV cache lives only during a call of `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burnish.boxes.shards import Publication
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.records import Completion, Request
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.decoding import Decoding
from burnish.rollout.builtin.inference_weights import InferenceModel
from burnish.rollout.builtin.stopping import Decode, StopRule


class BuiltinGenerator:
    """A `Generator` that decodes at most `slots` completions at once.

    `eos_token_ids` end every completion. `decode` turns ids into text; stop strings need it.
    """

    def __init__(
        self,
        model: InferenceModel,
        *,
        layout: Layout,
        slots: int,
        eos_token_ids: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        self._model, self._network = model, model.network
        self._layout, self._slots = layout, slots
        self._eos_token_ids, self._decode = tuple(eos_token_ids), decode
        self._version: int | None = None

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`.

        Raises `UsageError` before any work if no weights were loaded, a prompt is empty or leaves no room for `max_tokens`,
        a value of `sampling` is out of range, or stop strings lack `decode`.
        """
        if self._version is None:
            raise UsageError("the generator has no weights", do="call load_weights first")
        _check_sampling(sampling)
        for request in requests:
            self._check_length(request, sampling.max_tokens)
        stop_rule = StopRule(sampling, self._eos_token_ids, self._decode)
        decoding = Decoding(self._network, requests, sampling, stop_rule, self._slots)
        return decoding.run(self._version, watch)

    def load_weights(self, weights: Publication, version: int) -> None:
        """See `Generator.load_weights`. Every call must bring the same shards."""
        self._model.load(weights, self._layout)
        self._version = version

    def close(self) -> None:
        """Free the weights and end the generator's use."""
        self._version = None
        del self._model, self._network

    def _check_length(self, request: Request, max_tokens: int) -> None:
        length = len(request.token_ids)
        if length == 0:
            raise UsageError(f"prompt {request.prompt_key} is empty", want="at least one token")
        most = self._model.max_positions
        if most is not None and length + max_tokens > most:
            raise UsageError(
                f"prompt {request.prompt_key} and its completion may exceed the model's positions",
                have=f"{length} prompt tokens + {max_tokens} new ones",
                want=f"at most {most} (max_position_embeddings)",
                do="lower max_prompt_length or max_response_length",
            )


def _check_sampling(sampling: Sampling) -> None:
    """Raise `UsageError` for a value out of range."""
    rules = {
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "temperature": (sampling.temperature >= 0, "0 or more"),
        "top_k": (sampling.top_k >= 0, "0 or more"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "min_p": (0 <= sampling.min_p < 1, "in [0, 1)"),
    }
    for name, (fine, want) in rules.items():
        if not fine:
            raise UsageError(f"{name} is out of range", have=getattr(sampling, name), want=want)
