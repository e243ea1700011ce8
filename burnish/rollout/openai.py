"""An OpenAI-compatible endpoint as a generator, with fixed weights.

Messages go to URL/chat/completions, texts to URL/completions: one request per sample, with its own seed. Conversations with an
environment go on in token ids, which URL/completions of vLLM takes and gives.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import numpy as np

from burnish.boxes.shards import Publication
from burnish.config.schema import RolloutConfig
from burnish.data.messages import Message, called, tools_of
from burnish.errors import BurnishError, UsageError
from burnish.records import Completion, Prompt, Request, StopReason
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Generator, Sampling, Watch, limit_of, require_valid
from burnish.rollout.client import in_threads, next_of
from burnish.rollout.completions_api import CompletionsApi

# Concurrent requests if `rollout.slots` is auto.
_AT_ONCE = 32


def _api_message(message: Message) -> Message:
    """Return a message as the API takes it: with arguments of calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = called(call).get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(call | {"function": {**called(call), "arguments": text}})
    return message | {"tool_calls": calls}


class EndpointGenerator(Generator):
    """Generates for evaluation. Its completions have texts; their log-probs are NaN."""

    called_by_rank0 = True

    def __init__(
        self,
        settings: RolloutConfig,
        *,
        encode: Callable[[str], Sequence[int]],
        template_variables: Mapping[str, Any],
        eos_token_ids: Sequence[int],
    ) -> None:
        """`encode` turns an answer into token ids. A turn of a conversation ends at `eos_token_ids`."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._api = CompletionsApi(
            settings.url or "",
            settings.timeout_seconds,
            at="rollout.url",
            named="rollout.model",
            bounded="rollout.slots bounds the requests at one time, ",
        )
        self._model = settings.model
        self._encode = encode
        self._slots = _AT_ONCE if settings.slots == "auto" else settings.slots
        self._variables = dict(template_variables)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`. The endpoint draws.

        Raises `BurnishError` if the endpoint refuses a request or keeps failing.
        """
        require_valid(requests, sampling, None)
        samples = [
            (request, request.first_sample + number)
            for request in requests
            for number in range(request.samples)
        ]
        waiting = deque(enumerate(samples))
        stop = threading.Event()
        reported = 0
        completions: dict[int, Completion] = {}
        errors: list[Exception] = []

        def ask() -> None:
            try:
                with closing(self._api.connection()) as connection:
                    while not stop.is_set() and (numbered := next_of(waiting)) is not None:
                        number, (request, sample) = numbered
                        completion = self._answer(connection, request, sample, sampling, stop)
                        if completion is not None:
                            completions[number] = completion
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                stop.set()

        def tell() -> None:
            nonlocal reported
            ended = len(completions)
            if watch is not None:
                watch(ended - reported)
            reported = ended

        try:
            in_threads([ask] * min(self._slots, len(samples)), tell)
        finally:
            stop.set()
        if errors:
            raise errors[0]
        ordered = iter([completions[number] for number in range(len(samples))])
        return [[next(ordered) for _ in range(request.samples)] for request in requests]

    def _answer(
        self,
        connection: HTTPConnection,
        request: Request,
        sample: int,
        sampling: Sampling,
        stop: threading.Event,
    ) -> Completion | None:
        """Send one request. Return None after `stop`. Raises `BurnishError`."""
        assert request.prompt is not None
        in_ids = sampling.keeps  # a turn of a conversation, whose next turn goes on in the same ids
        chats = request.prompt.messages is not None and not in_ids
        path = f"{'chat/' if chats else ''}completions"
        body = self._body(request, sample, sampling)
        body |= (
            self._prompt_in_ids(request, sampling) if in_ids else self._prompt_of(request.prompt)
        )
        content = self._api.post(connection, path, body, stop)
        if content is None:
            return None
        try:
            choice = json.loads(content)["choices"][0]
            text = choice["message"]["content"] if chats else choice["text"]
            text = str(text or "")
            reason = str(choice["finish_reason"])
            listed = choice.get("token_ids") if in_ids else self._encode(text)
            ids = np.array(listed if listed is not None else [], np.int64).reshape(-1)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BurnishError(
                f"the endpoint {self._api.url} sends an answer that Burnish cannot read",
                have=self._api.quote(content),
                want="choices with a text and a finish_reason, as OpenAI's API has them",
                do="correct rollout.url",
            ) from error
        if listed is None:
            raise BurnishError(
                f"the endpoint {self._api.url} gives no token ids, in which a conversation goes on",
                have="an answer without token_ids",
                want="choices[0].token_ids, as vLLM gives them to requests with return_token_ids",
                do="serve the model with vLLM, or evaluate it without rollout.url by rollout.engine=builtin",
            )
        unknown = np.full(len(ids), np.nan, np.float32)
        ended: StopReason = "length" if reason == "length" else "stop"
        return Completion(ids, unknown, unknown, ended, weights_version=0, text=text)

    def _body(self, request: Request, sample: int, sampling: Sampling) -> dict[str, Any]:
        """Return how to draw."""
        key = (request.prompt_key, sample, *([request.turn] if request.turn else []))
        seed = derive_seed(sampling.seed, "endpoint", sampling.step, *key) % 2**31
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": limit_of(request, sampling),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        optional: dict[str, Any] = {  # sent only if set, because OpenAI's own API has only `stop`
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        return body | {name: value for name, value in optional.items() if value}

    def _prompt_in_ids(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        ends = [*self._eos_token_ids, *sampling.stop_token_ids]
        ids = request.token_ids.tolist()
        return {"prompt": ids, "return_token_ids": True, "stop_token_ids": ends}

    def _prompt_of(self, prompt: Prompt) -> dict[str, Any]:
        if prompt.messages is None:
            return {"prompt": prompt.text}
        tools = tools_of(dict(prompt.columns), f"row {prompt.index + 1}")
        optional = {"tools": tools, "chat_template_kwargs": self._variables}
        chat_fields = {name: value for name, value in optional.items() if value}
        return {
            "messages": [_api_message(message) for message in prompt.messages],
            **chat_fields,
        }

    def load_weights(self, weights: Publication, version: int) -> None:
        """Raise `UsageError`, because the weights are fixed."""
        raise UsageError(
            "an endpoint cannot be trained: its weights are fixed",
            do="set rollout.engine=builtin to train",
        )
