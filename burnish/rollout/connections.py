"""HTTP connections whose answers end in bounded time, however slowly their bytes arrive."""

from __future__ import annotations

import io
import socket
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult

# Bytes a second that a large message has to reach. A completion with the experts of its tokens has megabytes.
_LEAST_RATE = 64_000


class PacedResponse(HTTPResponse):
    """A response of which each message arrives within the connection's time-out, plus a second for each 64 kB of it."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._paced = _PacedReader(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._paced)

    def expect_message(self) -> None:
        """Begin to wait for another message."""
        self._paced.begin()


class _PacedReader(io.RawIOBase):
    """Read a socket until a deadline. A socket's own time-out begins anew with every byte."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self._socket = sock
        self._timeout = sock.gettimeout() or 0.0
        self.begin()

    def begin(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole message within {self._timeout:g} s")
        self._socket.settimeout(left)
        count = self._raw.readinto(buffer)
        self._deadline += (count or 0) / _LEAST_RATE
        return count

    def close(self) -> None:
        with suppress(OSError):  # it is closed
            self._socket.settimeout(self._timeout)  # for the next request
        self._raw.close()
        super().close()


def connection_to(url: SplitResult, timeout: float) -> HTTPConnection:
    """Return a connection, not yet open, whose responses are `PacedResponse`."""
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=timeout)
    connection.response_class = PacedResponse
    return connection
