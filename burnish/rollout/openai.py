"""An OpenAI-compatible endpoint as a generator, with fixed weights.

Messages go to URL/chat/completions, texts to URL/completions: one request per sample, with its own seed. Conversations with an
environment go on in token ids, which URL/completions of vLLM takes and gives.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from burnish.boxes.shards import Publication
from burnish.config.schema import RolloutConfig
from burnish.data.messages import Message, called, tools_of
from burnish.errors import BurnishError, UsageError
from burnish.files.strict_json import clipped
from burnish.records import Completion, Prompt, Request, StopReason
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Generator, Sampling, Watch, limit_of, require_valid
from burnish.rollout.client import in_threads, next_of
from burnish.rollout.connections import connection_to

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key."""
# Concurrent requests if `rollout.slots` is auto.
_AT_ONCE = 32
_RETRIES = 6
# Seconds between attempts. They double each time, unless the endpoint names a time.
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 30.0
# After these statuses, as after 500 and above, another attempt may succeed.
_BUSY = frozenset({408, 409, 425, 429})
# Most bytes of an answer. A completion of a million tokens has 4 MB.
_MOST_BYTES = 64 << 20


class _TransientError(Exception):
    """A failure after which a retry may succeed: the reason, and the seconds to wait if they are known."""


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
        self._url = urlsplit((settings.url or "").rstrip("/"))
        self._model = settings.model
        self._timeout = settings.timeout_seconds
        self._encode = encode
        self._slots = _AT_ONCE if settings.slots == "auto" else settings.slots
        self._variables = dict(template_variables)
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UsageError(
                f"the environment variable {KEY} is not a key",
                have="control characters, or letters beyond ASCII",
                do=f"set {KEY} to the endpoint's key alone",
            )
        self._key = key
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

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
                with closing(connection_to(self._url, self._timeout)) as connection:
                    while not stop.is_set() and (numbered := next_of(waiting)) is not None:
                        number, (request, sample) = numbered
                        answer = partial(self._answer, connection, request, sample, sampling)
                        completion = self._with_retries(answer, stop)
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

    def _with_retries(
        self, answer: Callable[[], Completion], stop: threading.Event
    ) -> Completion | None:
        """Return the completion, or None after `stop`. Raises `BurnishError`."""
        wait = _FIRST_WAIT
        reason = ""
        for _ in range(_RETRIES):
            try:
                return answer()
            except _TransientError as error:
                reason, asked = error.args
                if stop.wait(min(asked or wait, _LONGEST_WAIT)):
                    return None
                wait *= 2
        raise BurnishError(
            f"the endpoint {self._url.geturl()} failed {_RETRIES} times in a row",
            have=reason,
            want="an answer",
            do="check that it runs; rollout.slots bounds the requests at one time, "
            "rollout.timeout_seconds how long one may take",
        )

    def _answer(
        self, connection: HTTPConnection, request: Request, sample: int, sampling: Sampling
    ) -> Completion:
        """Send one request. Raises `_TransientError`, or `BurnishError` if a retry cannot help."""
        assert request.prompt is not None
        in_ids = sampling.keeps  # a turn of a conversation, whose next turn goes on in the same ids
        chats = request.prompt.messages is not None and not in_ids
        path = f"{self._url.path}/{'chat/' if chats else ''}completions"
        body = self._body(request, sample, sampling)
        body |= (
            self._prompt_in_ids(request, sampling) if in_ids else self._prompt_of(request.prompt)
        )
        try:
            connection.request("POST", path, json.dumps(body), self._headers)
            response = connection.getresponse()
            content = response.read(_MOST_BYTES)
        except (OSError, HTTPException) as error:
            connection.close()
            raise _TransientError(f"{type(error).__name__}: {error}", None) from error
        if response.status != 200:
            raise self._refusal(
                response.status, response.reason, content, response.headers.get("Retry-After")
            )
        try:
            choice = json.loads(content)["choices"][0]
            text = choice["message"]["content"] if chats else choice["text"]
            text = str(text or "")
            reason = str(choice["finish_reason"])
            listed = choice.get("token_ids") if in_ids else self._encode(text)
            ids = np.array(listed if listed is not None else [], np.int64).reshape(-1)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BurnishError(
                f"the endpoint {self._url.geturl()} sends an answer that Burnish cannot read",
                have=self._quote(content.decode(errors="replace")),
                want="choices with a text and a finish_reason, as OpenAI's API has them",
                do="correct rollout.url",
            ) from error
        if listed is None:
            raise BurnishError(
                f"the endpoint {self._url.geturl()} gives no token ids, in which a conversation goes on",
                have="an answer without token_ids",
                want="choices[0].token_ids, as vLLM gives them to requests with return_token_ids",
                do="serve the model with vLLM, or evaluate it without rollout.url by rollout.engine=builtin",
            )
        unknown = np.full(len(ids), np.nan, np.float32)
        stop: StopReason = "length" if reason == "length" else "stop"
        return Completion(ids, unknown, unknown, stop, weights_version=0, text=text)

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

    def _refusal(self, status: int, reason: str, content: bytes, wait: str | None) -> Exception:
        quoted = self._quote(f"{status} {reason}: {content.decode(errors='replace')}")
        if status in _BUSY or status >= 500:
            seconds = (wait or "").strip()
            return _TransientError(quoted, float(seconds) if seconds.isdecimal() else None)
        remedies = {
            401: f"set the environment variable {KEY} to a key of this endpoint",
            403: f"set the environment variable {KEY} to a key that may use this model",
            404: "correct rollout.url, which often ends in /v1, or rollout.model",
        }
        return BurnishError(
            f"the endpoint {self._url.geturl()} refuses a request",
            have=quoted,
            want="status 200",
            do=remedies.get(status, "correct the setting that the endpoint names"),
        )

    def _quote(self, text: str) -> str:
        """Return the beginning of what the endpoint says, without the key, which it may repeat."""
        return clipped(text.replace(self._key, "***") if self._key else text)

    def load_weights(self, weights: Publication, version: int) -> None:
        """Raise `UsageError`, because the weights are fixed."""
        raise UsageError(
            "an endpoint cannot be trained: its weights are fixed",
            do="set rollout.engine=builtin to train",
        )
