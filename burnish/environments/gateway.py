"""Let agents that speak HTTP hold the conversations of a run.

An agent is a program that asks a server for the model's answers, as OpenAI's API and vLLM have it. Here the server is the worker process
of the environments, and an agent's requests are its observations. So an agent has what each environment has: the model's turns in waves,
deadlines, and repetition after a loss.

    POST /s/SESSION/v1/chat/completions    messages and tools, perhaps streamed
    POST /s/SESSION/inference/v1/generate  token ids
    GET  /s/SESSION/v1/models              the model

A client that cannot have a URL for each session leaves out /s/SESSION and sends the header X-Session-ID.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

import xxhash

from burnish.distributed.listening import HttpServer, listen, url_of
from burnish.environments.base import Environment, EnvironmentFailure, Observation
from burnish.environments.calls import AgentReply, Ask, Asking
from burnish.errors import UsageError
from burnish.functions import load_function

MODEL = "policy"
"""The name under which agents know the model."""
_MOST_BYTES = 64 << 20
"""Most bytes of a request."""
_TOGETHER_SECONDS = 0.01
"""How long a wave waits for further requests of an agent that has asked. Its parts may ask at the same time."""
_EARLIER = 0.9
"""The share of a deadline after which an agent is late. At the whole of it the pool would end the process, with all its agents."""
_UNREADABLE = "features", "content_parts"
_NUMBERS = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING = (
    *_NUMBERS,
    *("stop", "stop_token_ids", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("response_format", "tool_choice", "structured_outputs", "min_tokens", "ignore_eos"),
)
"""Parameters that the trainer compares with its own. Others do not concern what is drawn."""


class Agent(Environment):
    """One conversation of `rollout.environment.agent`."""

    def __init__(self, agent: str, timeout_seconds: float, **kwargs: Any) -> None:
        """`kwargs` are further arguments of the function."""
        self._agent = agent
        self._kwargs = kwargs
        self._seconds = _EARLIER * timeout_seconds
        self._session = AgentSession()

    @classmethod
    def schemas(
        cls, agent: str = "", timeout_seconds: float = 0.0, **kwargs: Any
    ) -> Sequence[Mapping[str, Any]]:
        """Import the function. An agent's tools are its own, so there are no schemas. Raises `UsageError` for one that cannot be called."""
        function = load_function(agent, "rollout.environment.agent")
        try:
            inspect.signature(function).bind({}, "", 0, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"rollout.environment.agent: {agent} cannot be called",
                have=f"{agent}{inspect.signature(function)}: {error}",
                want=f"parameters row, url and seed{''.join(f', {name}' for name in kwargs)}",
                do="correct the function, or rollout.environment.kwargs",
            ) from error
        return ()

    async def begin(self, row: Mapping[str, Any], seed: int) -> Observation:  # type: ignore[override]
        """Start the agent, and return its first requests."""
        server = gateway()
        url = server.open(self._session, self._session.key)
        server.start(partial(self.act, row, url, seed), self._session)
        return await self._session.observation(self._seconds)

    async def step(self, action: Any) -> Observation:  # type: ignore[override]
        """Answer the agent's requests, and return its next ones, or its rewards."""
        self._session.answer(action)
        return await self._session.observation(self._seconds)

    async def act(self, row: Mapping[str, Any], url: str, seed: int) -> Any:
        """Hold the conversation; return rewards."""
        function = load_function(self._agent, "rollout.environment.agent")
        call = partial(function, row, url, seed, **self._kwargs)
        return await (call() if inspect.iscoroutinefunction(function) else _in_thread(call))

    def close(self) -> None:
        """Stop the agent. A function that is no coroutine gets no further answers."""
        self._session.end()


class SessionEnded(Exception):
    """The session has ended, so there are no answers."""


class AgentSession:
    """Requests of one conversation. Its methods may be called in any thread."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(12)
        self._lock = threading.Lock()
        self._asks: list[Ask] = []
        """What the trainer does not know yet."""
        self._answers: dict[int, Future[AgentReply]] = {}
        self._bodies: dict[str, int] = {}
        """Numbers of requests, by what they were."""
        self._woken: Future[None] = Future()
        self._outcome: Observation | BaseException | None = None
        self._stop: Callable[[], object] = lambda: None

    def ask(self, ask: Ask, *, again: bool) -> AgentReply:
        """Wait for the model. With `again`, the client repeats a request, and both get the same answer. Raises `SessionEnded`."""
        digest = xxhash.xxh3_128_hexdigest(repr(ask).encode())
        with self._lock:
            if self._outcome is not None:
                raise SessionEnded
            number = self._bodies.get(digest) if again else None
            if number is None:
                number = len(self._answers)
                self._bodies[digest] = number
                self._answers[number] = Future()
                self._asks.append(ask._replace(number=number))
                self._wake()
            answer = self._answers[number]
        try:
            return answer.result()
        except CancelledError as error:
            raise SessionEnded from error

    def answer(self, replies: Sequence[AgentReply]) -> None:
        """Answer the requests of the last observation, in order."""
        with self._lock:
            open_answers = [each for each in self._answers.values() if not each.done()]
            for answer, reply in zip(open_answers, replies, strict=False):
                answer.set_result(reply)

    async def observation(self, seconds: float) -> Observation:
        """Wait until the agent asks or ends. Raises `EnvironmentFailure` if it is late, and what it raises."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._woken), seconds)
        except TimeoutError as error:
            self.end()
            raise EnvironmentFailure(
                f"the agent neither asked nor ended within {seconds:g} s"
            ) from error
        if self._outcome is None:
            await asyncio.sleep(_TOGETHER_SECONDS)
        with self._lock:
            if self._outcome is None:
                asks = tuple(self._asks)
                self._asks.clear()
                self._woken = Future()
                return Asking(asks=asks)
        if not isinstance(self._outcome, BaseException):
            return self._outcome
        if isinstance(self._outcome, Exception):
            raise self._outcome
        raise EnvironmentFailure(f"the agent raised {type(self._outcome).__name__}")

    def started(self, stop: Callable[[], object]) -> None:
        """Remember how to stop the agent."""
        self._stop = stop

    def finish(self, outcome: Observation | BaseException) -> None:
        """Take what the agent returned or raised. Requests that wait get no answer."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
            self._wake()
            for answer in self._answers.values():
                answer.cancel()

    def end(self) -> None:
        """Stop the agent."""
        self.finish(Observation(done=True))
        self._stop()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


class Gateway:
    """The server of a process, and the event loop of its agents."""

    def __init__(self) -> None:
        """Listen at a free port of this machine."""
        self._sessions: dict[str, AgentSession] = {}
        self._http = HttpServer(listen("127.0.0.1", 0), partial(_Handler, self._sessions.get))
        self._loop = asyncio.new_event_loop()
        self.url = url_of(self._http.socket)
        for run in (self._http.serve_forever, self._loop.run_forever):
            threading.Thread(target=run, daemon=True).start()

    def open(self, session: AgentSession, key: str) -> str:
        """Let a key name a session; return the session's URL, as clients of OpenAI's API take it."""
        self._sessions[key] = session
        return f"{self.url}/s/{key}/v1"

    def start(self, act: Callable[[], Awaitable[Any]], session: AgentSession) -> None:
        """Run an agent in the loop, and tell the session how it ends."""

        async def run() -> None:
            try:
                session.finish(_observation_of(await act()))
            except BaseException as error:  # noqa: BLE001 - the session raises it
                session.finish(error)
            finally:
                for key in [key for key, each in self._sessions.items() if each is session]:
                    del self._sessions[key]

        task = asyncio.run_coroutine_threadsafe(run(), self._loop)
        session.started(task.cancel)


@lru_cache(maxsize=1)
def gateway() -> Gateway:
    """Return this process's gateway."""
    return Gateway()


def _observation_of(result: Any) -> Observation:
    """Return what an agent returned as its last observation."""
    if isinstance(result, Observation):
        return replace(result, done=True)
    return Observation(rewards={} if result is None else result, done=True)


def _in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
    """Call a function in a thread of its own. Pools of threads would have a limit, and the process could not end without it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the future raises it
            _set(future.set_exception, error)
        else:
            _set(future.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


def _set(setter: Callable[[Any], None], value: Any) -> None:
    with suppress(Exception):  # the session has ended, and nobody waits
        setter(value)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, session_of: Callable[[str], AgentSession | None], *args: Any) -> None:
        self._session_of = session_of
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the training's."""

    def do_GET(self) -> None:
        if re.fullmatch(r"(/s/[\w-]+)?/v1/models", self.path):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "burnish"}
            self._answer({"object": "list", "data": [model]})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path}")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MOST_BYTES} bytes")
            return
        content = self.rfile.read(int(length))
        path = re.fullmatch(
            r"(?:/s/([\w-]+))?/(v1/chat/completions|inference/v1/generate)",
            self.path.partition("?")[0],
        )
        session = path and self._session_of(path[1] or self.headers.get("X-Session-ID", ""))
        if path is None or session is None:
            what = "this session has ended" if path else f"there is no {self.path}"
            self._refuse(HTTPStatus.GONE if path else HTTPStatus.NOT_FOUND, what)
            return
        is_chat = path[2].startswith("v1")
        try:
            body = json.loads(content)
            ask = ask_of(body, is_chat=is_chat)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        # OpenAI's clients repeat a request that took too long.
        again = self.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            reply = session.ask(ask, again=again)
        except SessionEnded:
            self._refuse(HTTPStatus.GONE, "this session has ended")
            return
        if reply.refusal is not None:
            self._refuse(HTTPStatus.BAD_REQUEST, reply.refusal)
        elif not is_chat:
            self._answer(generated(reply))
        elif body.get("stream"):
            self._stream(chat_chunks(reply, body))
        else:
            self._answer(chat_completion(reply, body))

    def _answer(self, body: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        content = json.dumps(body).encode()
        with suppress(OSError):  # the agent has hung up
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "code": int(status)}
        self._answer({"error": error}, status)

    def _stream(self, events: Iterator[Mapping[str, Any]]) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")


def ask_of(body: Any, *, is_chat: bool) -> Ask:
    """Read a request. Raises `ValueError` for what the gateway cannot do."""
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    settings = body if is_chat else body.get("sampling_params") or {}
    if settings.get("n") not in (None, 1):
        raise ValueError("n: a request gets one answer")
    limits = [settings.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most = next((limit for limit in limits if limit is not None), None)
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_tokens: {most!r} is no number above 0")
    sampling = _sampling_of(settings)
    if is_chat:
        messages = body.get("messages")
        tools = body.get("tools") or []
        if not messages or not all(_is(each, dict) for each in (messages, tools)):
            raise ValueError("messages and tools have to be lists of objects")
        if not all(map(_is_message, messages)):
            raise ValueError("a message has a role, and a content that is text")
        if not all(isinstance(tool.get("function", tool).get("name"), str) for tool in tools):
            raise ValueError("a tool has a function with a name")
        return Ask(0, None, messages, tools, most, sampling)
    unread = [name for name in _UNREADABLE if body.get(name)]
    ids = body.get("token_ids")
    if unread:
        raise ValueError(f"{unread[0]}: only text is read")
    if not ids or not _is(ids, int):
        raise ValueError("token_ids has to be a list of integers, and not empty")
    return Ask(0, tuple(ids), (), (), most, sampling)


def _sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    wrong = [name for name in _NUMBERS if not isinstance(sampling.get(name, 0), int | float)]
    stop = sampling.get("stop", "")
    if not (isinstance(stop, str) or _is(stop, str)):
        wrong.append("stop")
    if not _is(sampling.get("stop_token_ids", []), int):
        wrong.append("stop_token_ids")
    if wrong:
        raise ValueError(f"{wrong[0]}: {sampling[wrong[0]]!r:.80} has another type")
    return sampling


def _is(value: Any, kind: type) -> bool:
    """Return whether a value is a list of a kind."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _is_message(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls") or []
    return (
        isinstance(message.get("role"), str)
        and isinstance(message.get("content") or "", str | list)
        and _is(calls, dict)
    )


def generated(reply: AgentReply) -> dict[str, Any]:
    """Return an answer as vLLM's `/inference/v1/generate` has it."""
    choice = {
        "index": 0,
        "token_ids": list(reply.token_ids),
        "logprobs": _logprobs(reply),
        "finish_reason": reply.stop_reason,
    }
    return {"request_id": _name(reply), "choices": [choice], "usage": _usage(reply)}


def chat_completion(reply: AgentReply, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as OpenAI's API has it; with `return_token_ids`, ids beside it, as vLLM does."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", **_message(reply)},
        "finish_reason": _finish_reason(reply),
        "logprobs": _logprobs(reply) if body.get("logprobs") else None,
    }
    answer = _head(reply, body) | {"object": "chat.completion", "choices": [choice]}
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = list(reply.prompt_token_ids)
        choice["token_ids"] = list(reply.token_ids)
    return answer | {"usage": _usage(reply)}


def chat_chunks(reply: AgentReply, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream. It is whole when it begins, because the model's turns come in waves."""
    head = _head(reply, body) | {"object": "chat.completion.chunk"}
    message = _message(reply)
    for number, call in enumerate(message.get("tool_calls", ())):
        call["index"] = number
    deltas: tuple[dict[str, Any], ...] = ({"role": "assistant", "content": ""}, message, {})
    for number, delta in enumerate(deltas):
        reason = _finish_reason(reply) if number == len(deltas) - 1 else None
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": _usage(reply)}


def _head(reply: AgentReply, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": _name(reply), "created": 0, "model": body.get("model") or MODEL}


def _name(reply: AgentReply) -> str:
    return f"chatcmpl-{xxhash.xxh3_64_hexdigest(repr(reply).encode())}"


def _message(reply: AgentReply) -> dict[str, Any]:
    message: dict[str, Any] = {"content": reply.content or None}
    if reply.thoughts:
        message["reasoning_content"] = reply.thoughts
    if reply.calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, name, arguments in reply.calls
        ]
    return message


def _finish_reason(reply: AgentReply) -> str | None:
    return "tool_calls" if reply.calls and reply.stop_reason == "stop" else reply.stop_reason


def _logprobs(reply: AgentReply) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    return {"content": content}


def _usage(reply: AgentReply) -> dict[str, int]:
    asked = len(reply.prompt_token_ids)
    said = len(reply.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
