"""Serve a generator over HTTP, for training in other processes.

    PUT  /weights?version=N   pieces of all weights (`burnish.rollout.messages`)
    POST /completions         requests; answers with progress, then completions
    POST /release             frees device memory until the next weights
    GET  /checksums           of each tensor that it computes with
    GET  /                    what it is

All but the socket runs in the thread that calls `run`, one call at a time. Who does not know the token gets 401.
"""

from __future__ import annotations

import hmac
import io
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qs, urlsplit

from burnish.boxes.shards import Publication
from burnish.errors import BurnishError
from burnish.rollout import messages
from burnish.rollout.base import Generator

_BEAT_SECONDS = 1.0
# A client hears of a call under way at least so often, unless the generator hangs.

log = logging.getLogger("burnish")


class GeneratorServer:
    """A generator, and the socket at which it is asked."""

    def __init__(
        self,
        generator: Generator,
        *,
        token: str,
        about: Mapping[str, Any],
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Listen at once. `about` is told to whoever knows the token. Raises `OSError` if the address is not free."""
        self._generator, self._token, self._about = generator, token, dict(about)
        self._version: int | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._http = _Http((host, port), partial(_Handler, self))
        self.port = self._http.server_port
        """Where it listens."""

    def run(self) -> None:
        """Answer until `stop`."""
        thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        thread.start()
        while (call := self._calls.get()) is not None:
            call()
        self._http.shutdown()
        self._http.server_close()

    def stop(self) -> None:
        """End `run` after the call under way."""
        self._calls.put(None)

    def knows(self, header: str | None) -> bool:
        """Return whether a request may be answered."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self._token}".encode())

    def about(self) -> dict[str, Any]:
        """Return what it is."""
        return {**self._about, "version": self._version}

    def call(self, made: Callable[[], Any], *, between_steps: bool = False) -> Future[Any]:
        """Have the thread of `run` call a function: in turn, or soon, in the middle of a generation."""
        future: Future[Any] = Future()

        def call() -> None:
            future.set_running_or_notify_cancel()
            try:
                future.set_result(made())
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                future.set_exception(error)

        if between_steps:
            self._loads.put(call)
            call = self._load
        self._calls.put(call)
        return future

    def _load(self) -> None:
        while not self._loads.empty():
            self._loads.get()()

    def load_weights(self, body: BinaryIO, version: int) -> None:
        """Load the weights that a body holds; without all of them there is no version."""
        self._version = None
        self._generator.load_weights(Publication(messages.read_shards(body)), version)
        self._version = version

    def complete(self, asked: messages.Message, say: Callable[[list[bytes]], None]) -> list[bytes]:
        """Return completions, or the version that it holds if that is another; `say` gets messages on the way."""
        requests, sampling, version = messages.read_requests(asked)
        held, in_flight = self._version, bool(asked.fields["in_flight"])
        if held is None or not (held == version or (in_flight and held > version)):
            return messages.encode({"holds": held})
        told, ended = time.monotonic(), 0

        def watch(count: int) -> None:
            nonlocal told, ended
            ended += count
            if in_flight:
                self._load()
            if ended or time.monotonic() - told >= _BEAT_SECONDS:
                say(messages.encode({"ended": ended}))
                told, ended = time.monotonic(), 0

        return messages.encode_completions(self._generator.generate(requests, sampling, watch))

    def release(self) -> None:
        """Free device memory until the next weights."""
        self._version = None
        self._generator.release()

    def checksums(self) -> list[bytes]:
        """Return the generator's checksums."""
        told = [
            [spec.name, spec.shape, str(spec.dtype).removeprefix("torch."), checksum]
            for spec, checksum in self._generator.checksums()
        ]
        return messages.encode({"checksums": told})


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, server: GeneratorServer, *args: Any) -> None:
        self._server = server
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path == "/":
            self._answer(messages.encode(self._server.about()))
        elif self.path == "/checksums":
            self._result(self._server.call(self._server.checksums))
        else:
            self._error(HTTPStatus.NOT_FOUND)

    def do_PUT(self) -> None:
        url = urlsplit(self.path)
        version = parse_qs(url.query).get("version", [""])[0]
        if self._refused():
            return
        if url.path != "/weights" or not version.isdecimal():
            self._error(HTTPStatus.NOT_FOUND)
            return
        body = self._body()
        load = partial(self._server.load_weights, body, int(version))
        self._result(self._server.call(load, between_steps=True))

    def do_POST(self) -> None:
        if self._refused():
            return
        if self.path == "/release":
            self._result(self._server.call(self._server.release))
            return
        if self.path != "/completions":
            self._error(HTTPStatus.NOT_FOUND)
            return
        try:
            asked = messages.read(self._body())
        except ValueError:
            asked = None
        if asked is None:
            self._error(HTTPStatus.BAD_REQUEST)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        call = self._server.call(partial(self._server.complete, asked, self._say))
        told = time.monotonic()
        while not call.running() and not call.done():  # another call is under way
            time.sleep(0.001)
            if time.monotonic() - told >= _BEAT_SECONDS:
                self._say(messages.encode({"ended": 0}))
                told = time.monotonic()
        try:
            self._say(call.result())
        except BurnishError as error:
            self._say(messages.encode_error(error))
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, message: list[bytes]) -> None:
        """Send a message as a chunk. Raises `OSError` when nobody listens any more, which ends the call."""
        self.wfile.write(b"%x\r\n" % sum(map(len, message)))
        for part in message:
            self.wfile.write(part)
        self.wfile.write(b"\r\n")
        self.wfile.flush()

    def _result(self, call: Future[Any]) -> None:
        try:
            found = call.result()
        except (BurnishError, ValueError, OSError) as error:
            if not isinstance(error, BurnishError):
                error = BurnishError(f"the request cannot be read: {error}")
            found = messages.encode_error(error)
            self.close_connection = True  # perhaps with a part of the body that nobody reads
        self._answer(found or messages.encode({}))

    def _answer(self, message: list[bytes]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(sum(map(len, message))))
        self.end_headers()
        for part in message:
            self.wfile.write(part)

    def _error(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self.send_error(status)

    def _refused(self) -> bool:
        if self._server.knows(self.headers.get("Authorization")):
            return False
        self._error(HTTPStatus.UNAUTHORIZED)
        return True

    def _body(self) -> BinaryIO:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return io.BufferedReader(_Chunks(cast(BinaryIO, self.rfile)), 1 << 20)
        return io.BytesIO(self.rfile.read(int(self.headers.get("Content-Length", 0))))


class _Chunks(io.RawIOBase):
    """The body of a chunked request as a stream."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._left, self._ended = source, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left == 0 and not self._ended:
            self._left = int(self._source.readline(20), 16)
            if self._left == 0:
                self._source.readline(2)
                self._ended = True
        if self._ended:
            return 0
        size = cast(Any, self._source).readinto(memoryview(buffer)[: self._left])
        if not size:
            raise EOFError("the sender is gone")
        self._left -= size
        if self._left == 0:
            self._source.readline(2)
        return int(size)
