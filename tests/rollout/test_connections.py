"""Answers that arrive byte by byte end at the time-out, and those that keep up do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from burnish.rollout.connections import PacedResponse, connection_to

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@contextmanager
def listening(script: Callable[[socket.socket], None]) -> Iterator[str]:
    """One that reads a request's head, does what the script does, and does so again on the same connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        while connection.recv(1 << 16):
                            script(connection)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def dripping(data: bytes, before: bytes = b"") -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        connection.sendall(before)
        for number in range(len(data)):
            connection.sendall(data[number : number + 1])
            time.sleep(0.05)

    return script


@pytest.mark.parametrize(
    "script",
    [
        dripping(HEAD % 3 + b"abc"),
        dripping(b"x" * 200, b"HTTP/1.1 200 OK\r\nX: "),
        dripping(b"a" * 100, HEAD % 100),
        dripping(b"a" * 100, b"HTTP/1.1 200 OK\r\n\r\n"),
        dripping(
            b"1\r\na\r\n" * 30,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
    ],
)
def test_what_drips_is_too_late(script: Callable[[socket.socket], None]) -> None:
    with listening(script) as url, closing(connection_to(urlsplit(url), 0.5)) as connection:
        connection.request("GET", "/")
        with pytest.raises(OSError, match=r"time|whole"), ExitStack() as stack:
            stack.enter_context(closing(connection.getresponse())).read()


def test_each_message_has_its_own_time() -> None:
    """Altogether they take longer than the time-out."""

    def script(connection: socket.socket) -> None:
        connection.sendall(HEAD % 40)
        for _ in range(8):
            connection.sendall(b"abcd\n")
            time.sleep(0.2)

    with listening(script) as url, closing(connection_to(urlsplit(url), 1.0)) as connection:
        connection.request("GET", "/")
        with closing(connection.getresponse()) as answer:
            assert isinstance(answer, PacedResponse)
            for _ in range(8):
                answer.expect_message()
                assert answer.readline() == b"abcd\n"


def test_a_large_message_has_more_time_and_the_connection_is_used_again() -> None:
    size = 1 << 18

    def script(connection: socket.socket) -> None:
        connection.sendall(HEAD % (8 * size))
        for _ in range(8):
            connection.sendall(bytes(size))
            time.sleep(0.2)

    with listening(script) as url, closing(connection_to(urlsplit(url), 1.0)) as connection:
        for _ in range(2):
            connection.request("GET", "/")
            assert len(connection.getresponse().read()) == 8 * size
