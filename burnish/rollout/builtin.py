"""The built-in generator: samples from a copy of the model in the training process, on any device.

It holds its own weights in the compute dtype, filled from the engine's shards whatever their
layout. Keys and values live only during a call of `generate`. Left out: other processes and
machines (each rank generates its own requests), tensor-parallel models, quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.errors import UsageError
from burnish.models.building import build_on_meta, materialize
from burnish.models.names import model_shards
from burnish.models.scorer import logit_transform
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Shard
from burnish.parallel.transfer import Transfer
from burnish.records import Completion, Request
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.decoding import Decoding, Network
from burnish.rollout.forward import forward_of
from burnish.rollout.products import Product
from burnish.rollout.stopping import Decode, StopRule


class BuiltinGenerator:
    """A `Generator` that decodes here, in at most `slots` slots at one time.

    `eos_token_ids` end every completion; `decode` turns ids into text and is needed for stop strings.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
        slots: int,
        eos_token_ids: Sequence[int],
        decode: Decode | None = None,
    ) -> None:
        """Raises `IncompatibleError` for a model that Burnish does not build."""
        self._layout, self._slots = layout, slots
        self._eos_token_ids, self._decode = tuple(eos_token_ids), decode
        self._max_positions: int | None = getattr(hf_config, "max_position_embeddings", None)
        self._transform = logit_transform(hf_config)
        self._model = build_on_meta(hf_config).requires_grad_(False).eval()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)
        materialize(self._model, device)
        self._forward = forward_of(self._model)
        self._head = Product(self._model.get_output_embeddings().weight)
        self._network = Network(self._forward, self._logits, device, hf_config.num_hidden_layers)
        self._transfer: Transfer | None = None
        self._version: int | None = None

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`.

        Raises `UsageError` before any work: for an empty prompt, one that leaves no room for
        `max_tokens` in the model's positions, values of `sampling` out of range, or stop strings
        without `decode`; and when no weights have been loaded.
        """
        if self._version is None:
            raise UsageError("the generator has no weights", do="call load_weights first")
        _check_sampling(sampling)
        for request in requests:
            self._check_length(request, sampling.max_tokens)
        stop_rule = StopRule(sampling, self._eos_token_ids, self._decode)
        decoding = Decoding(self._network, requests, sampling, stop_rule, self._slots)
        return decoding.run(self._version, watch)

    def load_weights(self, shards: Iterator[Shard], version: int) -> None:
        """See `Generator.load_weights`. The pieces have to be the same at every call."""
        have, want = list(shards), list(model_shards(self._model))
        if self._transfer is None:
            self._transfer = Transfer(have, want, self._layout)
        self._transfer.run(have, want)
        self._forward.refresh()
        self._head.refresh()
        self._version = version

    def close(self) -> None:
        """Free the weights; the generator cannot be used afterwards."""
        self._version = None
        del self._model, self._network, self._forward, self._head

    def _logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits as `Scorer` computes them, in memory of their own."""
        return self._transform.apply_(self._head(hidden).float())

    def _check_length(self, request: Request, max_tokens: int) -> None:
        length = len(request.token_ids)
        if length == 0:
            raise UsageError(f"prompt {request.prompt_key} is empty", want="at least one token")
        if self._max_positions is not None and length + max_tokens > self._max_positions:
            raise UsageError(
                f"prompt {request.prompt_key} and its completion may exceed the model's positions",
                have=f"{length} prompt tokens + {max_tokens} new ones",
                want=f"at most {self._max_positions} (max_position_embeddings)",
                do="lower max_prompt_length or max_response_length",
            )


def _check_sampling(sampling: Sampling) -> None:
    """Refuse values that mean nothing."""
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
