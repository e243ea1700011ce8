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
from burnish.environments.agent_api import MODEL, ask_of, chat_chunks, chat_completion, generated
from burnish.environments.base import Environment, EnvironmentFailure, Observation
from burnish.environments.calls import AgentReply, Ask, Asking
from burnish.errors import UsageError
from burnish.functions import load_function

_MOST_BYTES = 64 << 20
"""Most bytes of a request."""
_TOGETHER_SECONDS = 0.01
"""How long a wave waits for further requests of an agent that has asked. Its parts may ask at the same time."""
_EARLIER = 0.9
"""The share of a deadline after which an agent is late. At the whole of it the pool would end the process, with all its agents."""


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
        return await (call() if inspect.iscoroutinefunction(function) else in_thread(call))

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
        self._http = HttpServer(listen("127.0.0.1", 0), partial(GatewayHandler, self._sessions.get))
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


def in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
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


class GatewayHandler(BaseHTTPRequestHandler):
    """Answers the requests of sessions, which it finds by their keys."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, session_of: Callable[[str], AgentSession | None], *args: Any) -> None:
        self._session_of = session_of
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the training's."""

    def do_GET(self) -> None:
        """Name the model."""
        if re.fullmatch(r"(/s/[\w-]+)?/v1/models", self.path):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "burnish"}
            self._answer({"object": "list", "data": [model]})
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path}")

    def content(self) -> bytes | None:
        """Return the request's content; None for one that is refused."""
        length = self.headers.get("Content-Length") or ""
        if length.isdecimal() and int(length) <= _MOST_BYTES:
            return self.rfile.read(int(length))
        self.close_connection = True
        self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MOST_BYTES} bytes")
        return None

    def do_POST(self) -> None:
        """Answer a request of a session."""
        content = self.content()
        if content is None:
            return
        path = re.fullmatch(
            r"(?:/s/([\w-]+))?/(v1/chat/completions|inference/v1/generate)",
            self.path.partition("?")[0],
        )
        session = path and self._session_of(path[1] or self.headers.get("X-Session-ID", ""))
        if path is None or session is None:
            what = "this session has ended" if path else f"there is no {self.path}"
            self.refuse(HTTPStatus.GONE if path else HTTPStatus.NOT_FOUND, what)
            return
        is_chat = path[2].startswith("v1")
        try:
            body = json.loads(content)
            ask = ask_of(body, is_chat=is_chat)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        # OpenAI's clients repeat a request that took too long.
        again = self.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            reply = session.ask(ask, again=again)
        except SessionEnded:
            self.refuse(HTTPStatus.GONE, "this session has ended")
            return
        if reply.refusal is not None:
            self.refuse(HTTPStatus.BAD_REQUEST, reply.refusal)
        elif not is_chat:
            self._answer(generated(reply))
        elif body.get("stream"):
            self._stream(chat_chunks(reply, body))
        else:
            self._answer(chat_completion(reply, body))

    def _answer(self, body: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send(json.dumps(body).encode(), status, "application/json")

    def send(self, content: bytes, status: int, kind: str) -> None:
        """Send an answer of a content type."""
        with suppress(OSError):  # the agent has hung up
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer with an error."""
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
