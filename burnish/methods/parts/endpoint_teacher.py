"""A teacher behind an endpoint with OpenAI's API: it echoes each sequence with the log-probs of its tokens."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from burnish.config.distillation import TeacherConfig
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError
from burnish.records import Batch, TokenOutputs
from burnish.rollout.client import in_threads, next_of
from burnish.rollout.completions_api import CompletionsApi

_AT_ONCE = 32
"""Concurrent requests of a process."""
_PROVEN = 128
"""How many ids, evenly from the whole vocabulary, have to be the same tokens before a run begins."""
_UNREADABLE = "�"
"""What a token becomes that is a part of a letter."""


class EndpointTeacher:
    """Scores tokens by /completions of vLLM, or of a server that also takes token ids and echoes them with log-probs."""

    def __init__(
        self,
        teacher: TeacherConfig,
        timeout: float,
        tokenizer: PreTrainedTokenizerBase,
        layout: Layout,
    ) -> None:
        """Prove that the endpoint answers, and that ids are the student's tokens. Collective. Raises `BurnishError`."""
        self._api = CompletionsApi(
            teacher.url or "",
            timeout,
            at="distill.teachers[].url",
            named="distill.teachers[].path",
        )
        self._model = teacher.path
        self._layout = layout
        self._text_of = cache(lambda number: tokenizer.decode([number]).strip())
        size = len(tokenizer)
        with agree(layout):
            if layout.is_main:
                self._ask([list(range(0, size, -(-size // _PROVEN)))])

    def forward(self, batch: Batch) -> list[TokenOutputs]:
        """Return the log-probs of trained tokens, and 0 for others. Collective."""
        spans = list[tuple[int, slice]]()
        for place, micro in enumerate(batch.microbatches):
            cuts = micro.cu_seqlens.tolist()
            pieces = map(slice, cuts[:-1], cuts[1:])
            spans += [(place, each) for each in pieces if micro.loss_mask[each].any()]
        micros = batch.microbatches
        own = list[Tensor]()
        with agree(self._layout):
            if self._layout.is_first_peer:
                own = self._ask([micros[place].input_ids[span].tolist() for place, span in spans])
        speaker = self._layout.peers(self._layout.data_rank)[0]
        answers = gather_objects(own, self._layout)[speaker]
        logprobs = [torch.zeros(micro.input_ids.shape) for micro in micros]
        for (place, span), answer in zip(spans, answers, strict=True):
            logprobs[place][span] = answer.masked_fill(~micros[place].loss_mask[span], 0.0)
        return [TokenOutputs(each) for each in logprobs]

    def _ask(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Return the log-probs of sequences; those of first tokens are 0."""
        waiting = deque(enumerate(sequences))
        answers: dict[int, Tensor] = {}
        errors = list[Exception]()
        stop = threading.Event()

        def ask() -> None:
            try:
                with closing(self._api.connection()) as connection:
                    while not stop.is_set() and (numbered := next_of(waiting)) is not None:
                        number, ids = numbered
                        body = {
                            "model": self._model,
                            "prompt": ids,
                            "echo": True,
                            "logprobs": 1,
                            "max_tokens": 1,
                            "temperature": 1.0,
                        }
                        content = self._api.post(connection, "completions", body, stop)
                        if content is not None:
                            answers[number] = self._read(content, ids)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                stop.set()

        try:
            in_threads([ask] * min(_AT_ONCE, len(sequences)), lambda: None)
        finally:
            stop.set()
        if errors:
            raise errors[0]
        return [answers[number] for number in range(len(sequences))]

    def _read(self, content: bytes, ids: Sequence[int]) -> Tensor:
        """Return the log-probs of an answer. Raises `BurnishError`, and `IncompatibleError` for other tokens than the student's."""
        count = len(ids)
        try:
            said = json.loads(content)["choices"][0]["logprobs"]
            texts = [str(text).strip() for text in said["tokens"][:count]]
            values = np.array(said["token_logprobs"][1:count], np.float32)
            if len(texts) < count or len(values) < count - 1 or not np.isfinite(values).all():
                raise ValueError("too few numbers")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BurnishError(
                f"the endpoint {self._api.url} does not score the tokens that it is given",
                have=self._api.quote(content),
                want="choices[0].logprobs with tokens and token_logprobs of the whole prompt, as vLLM gives them to requests with echo and logprobs",
                do="serve the teacher with vLLM, or set distill.teachers to its weights",
            ) from error
        for number, text in zip(ids, texts, strict=True):
            own = self._text_of(number)
            # Servers write special tokens, and parts of letters, in different ways.
            if own != text and own and text and _UNREADABLE not in own + text:
                raise IncompatibleError(
                    f"the teacher {self._model} at {self._api.url} has another vocabulary, so it cannot score the student's tokens",
                    have=f"token {number} is {own!r} of the student and {text!r} of the teacher",
                    want="the same token for each id",
                    do="serve a model of the student's family, with its tokenizer",
                )
        return torch.from_numpy(np.concatenate([np.zeros(1, np.float32), values]))
