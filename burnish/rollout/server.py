"""Serve a generator over HTTP, for training in other processes.

    PUT  /weights?version=N&owner=ID   pieces of all weights (`burnish.rollout.messages`); &anew=1: fixed ones first;
                              &staging=1: after offers of memory that both map (`burnish.rollout.staging`)
    POST /completions         requests; answers with progress, then completions
    GET  /completions         running requests, then their partial completions
    POST /release             frees device memory
    POST /forget              frees what is kept of conversations
    GET  /checksums           checksum of each tensor in use
    GET  /                    the server's description; 503 while it hangs

The thread that calls `run` does all but the socket, one call at a time. Requests without the token get 401.
"""

from __future__ import annotations

import hmac
import io
import logging
import queue
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl, urlsplit

import torch

from burnish.boxes.shards import Publication, Shard
from burnish.distributed.device import empty_cache
from burnish.distributed.listening import HttpServer, listen, url_of
from burnish.errors import BurnishError
from burnish.rollout import messages
from burnish.rollout.base import Generator
from burnish.rollout.weight_group import FAILURES, GroupHost, OwnProcess, Receivers

# Seconds between polls of a call, and between messages to its client.
_POLL_SECONDS = 0.2
_BEAT_SECONDS = 1.0

log = logging.getLogger("burnish")


class GeneratorServer:
    """Serves a generator."""

    def __init__(
        self,
        generator: Generator,
        *,
        token: str,
        about: Mapping[str, Any],
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = 600.0,
        receivers: Receivers | None = None,
    ) -> None:
        """Listen at once. Clients with the token can read `about`.

        `receivers` hold the generator's model, by default this process in host memory. A client that is silent for `timeout` seconds within a request is gone. Raises `UsageError` if the address is taken.
        """
        self._generator = generator
        self._token = token
        self._about = dict(about)
        self._timeout = timeout
        self.receivers = receivers or OwnProcess(torch.device("cpu"))
        """Who takes weights, and in which memory besides that of the host."""
        self.group = GroupHost(self.receivers, timeout)
        """The group that weights may come by."""
        self._last_progress = time.monotonic()
        self._version: int | None = None
        self._owner = ""
        self._asker = ""
        """Owner of the loaded weights, and of the running requests."""
        # Not a SimpleQueue, whose `get` can wait for ever if a signal arrives at the end of its time-out.
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._loads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._http = HttpServer(listen(host, port), partial(_Handler, self, timeout))
        self.url = url_of(self._http.socket)
        """The server's address."""

    def run(self, check: Callable[[], None] = lambda: None) -> None:
        """Answer requests until `check` raises between two calls."""
        serve = partial(self._http.serve_forever, _POLL_SECONDS)
        threading.Thread(target=serve, daemon=True).start()
        try:
            while True:
                check()
                self._last_progress = time.monotonic()
                with suppress(queue.Empty):
                    self._calls.get(timeout=_POLL_SECONDS)()
        finally:
            self._http.shutdown()
            self._http.server_close()
            self.group.leave()

    def knows(self, header: str | None) -> bool:
        """Return whether an Authorization header has the token."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self._token}".encode())

    @property
    def hangs(self) -> bool:
        """Whether there was no progress for `timeout` seconds."""
        return time.monotonic() - self._last_progress > self._timeout

    def about(self) -> dict[str, Any]:
        """Return the server's description."""
        return {**self._about, "version": self._version}

    def call(self, function: Callable[[], Any], *, between_steps: bool = False) -> Future[Any]:
        """Have the thread of `run` call a function, in turn or between decoding steps."""
        future: Future[Any] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the future raises it
                # Its frames refer to the future, which is a cycle. They hold a generation's cache, and views of a sender's memory.
                traceback.clear_frames(error.__traceback__)
                future.set_exception(error)

        if between_steps:
            # A generation with weights in flight takes it between two steps; else it comes in turn.
            self._loads.put(call)
            call = self._load
        self._calls.put(call)
        return future

    def _load(self) -> None:
        while not self._loads.empty():
            self._loads.get()()

    def load_weights(
        self,
        body: BinaryIO,
        version: int,
        owner: str,
        anew: bool,
        read_wave: Callable[[Sequence[Any], int, int], Iterator[Shard]] | None = None,
    ) -> None:
        """Load a body's weights for `owner`; until all have arrived there is no version. `read_wave` yields those that come another way."""
        self._version = None
        self._owner = owner
        read = partial(messages.read_shards, body, read_wave)
        fixed = read() if anew else iter(())
        changing = read()
        self._generator.load_weights(Publication(changing, fixed, anew), version)
        deque(chain(fixed, changing), maxlen=0)  # what the generator has left
        body.read()
        self._version = version

    def take_weights(
        self,
        fields: Mapping[str, Any],
        body: BinaryIO,
        address: str,
        say: Callable[[messages.Parts], None],
        load: Callable[..., None],
    ) -> None:
        """Agree with the sender on a way for weights, as `burnish.rollout.weight_group` says, and `load` them.

        `fields` are its first message, and `address` is where it has found this machine. Raises `NONSENSE`.
        """
        read = partial(self._read_wave, say)
        offers = fields["offers"]
        why = ""
        with ExitStack() as stack:
            stack.callback(self.receivers.unmap)
            mapped = self.receivers.map(offers)
            if fields["joins"] and (mapped is None or not self.group.prefers(offers[mapped])):
                try:
                    number, invitation = self.group.invite(fields, address)
                except FAILURES as error:
                    why = str(error)
                else:
                    agreed = messages.encode({"mapped": number, "group": invitation, "why": ""})
                    with self.group.ended_by_failure():
                        if invitation["id"] != fields["group"]:
                            say(agreed)
                            why = self.group.join(invitation, address, body)
                        if not why:
                            stack.close()
                            say(agreed)
                            load(read)
                            return
            say(messages.encode({"mapped": mapped, "group": None, "why": why}))
            load(None if mapped is None else read)

    def _read_wave(
        self, say: Callable[[messages.Parts], None], rows: Sequence[Any], begin: int, size: int
    ) -> Iterator[Shard]:
        yield from self.receivers.read(rows, begin, size)
        say(messages.encode({"read": True}))

    def complete(
        self, message: messages.Message, say: Callable[[messages.Parts], None]
    ) -> messages.Parts:
        """Return completions; `say` sends progress. Raises `ValueError` for weights of another version."""
        requests, sampling, version = messages.read_requests(message)
        loaded = self._version
        in_flight = bool(message.fields["in_flight"])
        if message.fields["owner"] != self._owner:
            raise ValueError(f"it holds another process's weights instead of version {version}")
        if loaded is None or not (loaded == version or (in_flight and loaded > version)):
            raise ValueError(f"it holds weights of version {loaded} instead of {version}")
        reported = time.monotonic()
        ended = 0
        self._asker = self._owner

        def watch(count: int) -> None:
            nonlocal reported, ended
            ended = ended + count
            self._last_progress = time.monotonic()
            if in_flight:
                self._load()
            if self._owner != self._asker:
                raise ValueError("another process has sent its weights")
            if self._version is None:
                raise ValueError("the new weights have not arrived completely")
            if ended or time.monotonic() - reported >= _BEAT_SECONDS:
                say(messages.encode({"ended": ended}))
                reported = time.monotonic()
                ended = 0

        return messages.encode_completions(self._generator.generate(requests, sampling, watch))

    def so_far(self) -> messages.Parts:
        """Return the running call's requests and partial completions."""
        parts = self._generator.so_far()
        if not parts:
            return messages.encode({})
        requests = [part.request for part in parts]
        encoded = messages.encode_requests(
            requests, parts[0].sampling, 0, self._asker, in_flight=True
        )
        return [*encoded, *messages.encode_completions([part.completions for part in parts])]

    def release(self) -> None:
        """Free device memory."""
        self._version = None
        self._generator.release()
        empty_cache()  # the training process needs the memory

    def forget(self) -> None:
        """Free what is kept of conversations."""
        self._generator.forget()

    def checksums(self) -> messages.Parts:
        """Return the generator's checksums."""
        rows = [
            [spec.name, spec.shape, str(spec.dtype).removeprefix("torch."), checksum]
            for spec, checksum in self._generator.checksums()
        ]
        return messages.encode({"checksums": rows})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, server: GeneratorServer, timeout: float, *args: Any) -> None:
        self._server = server
        self._timeout = timeout
        self._saying = threading.Lock()
        super().__init__(*args)

    def setup(self) -> None:
        self.request.settimeout(self._timeout)
        super().setup()

    def handle(self) -> None:
        self.handle_one_request()  # one per connection, because its body may be left half-read

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def do_GET(self) -> None:
        server = self._server
        url = urlsplit(self.path)
        if not server.knows(self.headers.get("Authorization")):
            self.send_error(HTTPStatus.UNAUTHORIZED)
            return
        match self.command, url.path:
            case "GET", "/" if server.hangs:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            case "GET", "/":
                self._answer(messages.encode(server.about()))
            case "GET", "/completions":
                self._answer(_result_of(server.call(server.so_far, between_steps=True)))
            case "GET", "/checksums":
                self._answer(_result_of(server.call(server.checksums)))
            case "POST", "/release":
                self._answer(_result_of(server.call(server.release)))
            case "POST", "/forget":
                self._answer(_result_of(server.call(server.forget)))
            case "PUT", "/weights":
                self._load(dict(parse_qsl(url.query)))
            case "POST", "/completions":
                self._complete()
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    do_PUT = do_GET
    do_POST = do_GET

    def _load(self, query: Mapping[str, str]) -> None:
        version, owner, anew = (query.get(name, "") for name in ("version", "owner", "anew"))
        if not version.isdecimal():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = io.BufferedReader(_Body(self))
        load = partial(self._server.load_weights, body, int(version), owner, bool(anew))
        if "staging" in query:
            self._load_staged(body, load)
        else:
            self._answer(_result_of(self._server.call(load, between_steps=True)))

    def _load_staged(self, body: BinaryIO, load: Callable[..., None]) -> None:
        """Answer by which way weights come, then when a buffer has been read, then the result."""
        message = self._begin_answer(body)
        if message is None:
            return
        address = self.connection.getsockname()[0]
        take = partial(self._server.take_weights, message.fields, body, address, self._say, load)
        call = self._server.call(take, between_steps=True)
        gone = select.poll()
        gone.register(self.connection, select.POLLRDHUP)
        while not wait([call], _POLL_SECONDS).done:
            if gone.poll(0):
                if call.cancel():
                    return
                self._server.group.give_up()
                wait([call])
        self._say(_result_of(call))
        self.wfile.write(b"0\r\n\r\n")

    def _complete(self) -> None:
        message = self._begin_answer(io.BufferedReader(_Body(self)))
        if message is None:
            return
        call = self._server.call(partial(self._server.complete, message, self._say))
        try:
            while not wait([call], _BEAT_SECONDS).done:
                if not call.running() and not self._server.hangs:  # it waits for another call
                    self._say(messages.encode({"ended": 0}))
            self._say(_result_of(call))
        finally:
            call.cancel()
        self.wfile.write(b"0\r\n\r\n")

    def _begin_answer(self, body: BinaryIO) -> messages.Message | None:
        """Read the first message, and begin an answer in chunks; None for a request that is refused."""
        try:
            message = messages.read_message(body)
        except messages.NONSENSE:
            message = None
        if message is None:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return None
        self.send_response(HTTPStatus.OK)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return message

    def _say(self, message: messages.Parts) -> None:
        """Send a chunk. The `OSError` of a client that has hung up ends the call."""
        with self._saying:
            self.wfile.write(b"".join([b"%x\r\n" % sum(map(len, message)), *message, b"\r\n"]))

    def _answer(self, message: messages.Parts) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(sum(map(len, message))))
        self.end_headers()
        self.wfile.write(b"".join(message))


def _result_of(call: Future[Any]) -> messages.Parts:
    try:
        return call.result() or messages.encode({})
    except BurnishError as error:
        return messages.encode_error(error)
    except Exception as error:
        level = logging.DEBUG if isinstance(error, OSError | ValueError) else logging.ERROR
        log.log(level, "a call failed", exc_info=error)
        return messages.encode({"failed": f"{type(error).__name__}: {error}"})


class _Body(io.RawIOBase):
    """The body of a request, with a length or chunked. Raises `ValueError` for any other."""

    def __init__(self, request: _Handler) -> None:
        self._source = cast(Any, request.rfile)
        self._in_chunks = request.headers.get("Transfer-Encoding") == "chunked"
        length = "0" if self._in_chunks else request.headers.get("Content-Length", "0")
        self._left = int(length) if length.isdecimal() else -1

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left == 0 and self._in_chunks:
            self._left = int(self._source.readline(20), 16)
            if self._left == 0:
                self._in_chunks = False
                self._source.readline(2)
        if self._left < 0:
            raise ValueError("the body has no valid length")
        size = self._source.readinto(memoryview(buffer)[: self._left]) if self._left else 0
        if self._left and not size:
            raise ValueError("the sender is gone")
        self._left -= size
        if self._left == 0 and self._in_chunks:
            self._source.readline(2)
        return int(size)
