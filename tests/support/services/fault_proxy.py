"""A proxy in front of an HTTP service that answers 503, cuts connections and falls silent when told to.

Runs in threads of the test's process, so that a test can say what goes wrong next and see what was asked.
"""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "te", "upgrade"})
_CODES = {400: "InvalidRequest", 403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError"}


@dataclass
class Fault:
    """What goes wrong, for the next `times` requests that it fits."""

    kind: Literal["status", "cut answer", "cut request", "silence", "late"]
    times: int
    method: str | None = None
    """Only requests with this method."""
    contains: str = ""
    """Only requests with this in their path or query."""
    status: int = 503
    after: int = 0
    """cut: bytes of the body that pass before."""
    seconds: float = 0.0
    """silence: its length."""
    release: threading.Event = field(default_factory=threading.Event)
    """late: the request stays on its way until this is set, and is lost where its sender goes before."""


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    path: str
    range: str | None
    """Its Range header."""
    fault: str | None
    """What went wrong with it on purpose."""


@dataclass
class FaultProxy:
    """Listens at `port` and passes everything on to `host`:`behind`."""

    host: str
    behind: int
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        """Nothing goes wrong, nothing was asked."""
        with self._lock:
            self.faults.clear()
            self.asked.clear()

    def take(self, method: str, path: str, headers: http.client.HTTPMessage) -> Fault | None:
        """The fault that this request meets."""
        with self._lock:
            fault = next((each for each in self.faults if _fits(each, method, path)), None)
            if fault is not None:
                fault.times -= 1
            kind = fault.kind if fault else None
            self.asked.append(Asked(method, path, headers.get("Range"), kind))
            return fault


def _fits(fault: Fault, method: str, path: str) -> bool:
    return fault.times > 0 and fault.method in (None, method) and fault.contains in path


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        proxy = self.server.proxy  # type: ignore[attr-defined]
        fault = proxy.take(self.command, self.path, self.headers)
        if fault is not None and fault.kind == "cut request":
            self.rfile.read(fault.after)
            self._hang_up()
            return
        body = self._body()
        if fault is not None and fault.kind == "silence":
            time.sleep(fault.seconds)
            self._hang_up()
            return
        if fault is not None and fault.kind == "status":
            code = _CODES.get(fault.status, "SlowDown")
            self._answer(fault.status, [], f"<Error><Code>{code}</Code></Error>".encode())
            return
        if fault is not None and fault.kind == "late" and self._is_left(fault.release):
            return
        headers = {name: text for name, text in self.headers.items() if name.lower() not in _HOP}
        connection = http.client.HTTPConnection(proxy.host, proxy.behind, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        limit = fault.after if fault is not None else None
        self._answer(answer.status, answer.getheaders(), content, limit)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = _pass_on

    def _is_left(self, release: threading.Event) -> bool:
        """Whether the client goes away before the release."""
        while not release.wait(0.05):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return True
        return False

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, limit: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, text in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = text
            elif name.lower() not in _HOP | {"content-length"}:
                self.send_header(name, text)
        self.send_header("Content-Length", length)
        self.end_headers()
        if limit is not None:
            self.wfile.write(content[:limit])
            self._hang_up()
        elif self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
