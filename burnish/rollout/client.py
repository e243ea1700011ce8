"""A generator that other processes are: each is asked for its share, and where one dies the others take over.

A prompt's draws do not depend on who makes them. Each rank sends weights to some of the servers; rank 0 asks all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import numpy as np
import torch

from burnish.boxes.gather import Gather
from burnish.boxes.shards import Publication, TensorSpec
from burnish.data.balance import share_evenly
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.records import Completion, Request
from burnish.rollout import messages
from burnish.rollout.base import Sampling, Watch

log = logging.getLogger("burnish")

_POLL_SECONDS = 0.2
# Between looks for a signal while servers generate.
_PROBE_SECONDS = 5.0
# How long a lost server has to answer before it gets weights again.


class ServerLost(Exception):
    """A server is gone, hangs, or says what makes no sense."""


class Server:
    """One generator in another process, as this one asks it."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        """`timeout` is the longest silence, in seconds, after which it counts as lost."""
        self.url, self._token, self._timeout = url, token, timeout
        self._asking: HTTPConnection | None = None

    def about(self, timeout: float | None = None) -> dict[str, Any]:
        """Return what it is. Raises `ServerLost`, also when it is silent for `timeout` seconds."""
        return dict(self._message("/", timeout).fields)

    def checksums(self) -> list[tuple[TensorSpec, str]]:
        """Return its generator's checksums. Raises `ServerLost`."""
        told = self._message("/checksums").fields["checksums"]
        return [
            (TensorSpec(name, tuple(shape), getattr(torch, dtype)), checksum)
            for name, shape, dtype, checksum in told
        ]

    def release(self) -> None:
        """Have it free device memory until the next weights. Raises `ServerLost`."""
        self._message("/release", method="POST")

    def upload(self, version: int) -> Upload:
        """Begin to send it weights. Raises `ServerLost`."""
        connection = self._connection()
        try:
            connection.putrequest("PUT", f"/weights?version={version}")
            connection.putheader("Authorization", f"Bearer {self._token}")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
        except OSError as error:
            raise ServerLost(f"{self.url}: {error}") from error
        return Upload(self, connection)

    def complete(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int,
        told: queue.SimpleQueue[int],
        *,
        in_flight: bool = False,
    ) -> list[list[Completion]]:
        """Return the completions of requests; `told` gets how many have ended. Raises `ServerLost`."""
        asked = messages.encode_requests(requests, sampling, version, in_flight=in_flight)
        body = b"".join(asked)
        self._asking = connection = self._connection()
        try:
            connection.request("POST", "/completions", body, self._headers())
            answer = self._answer(connection)
            while "ended" in (message := self._next(answer)).fields:
                told.put(int(message.fields["ended"]))
            if "holds" in message.fields:
                raise ValueError(
                    f"it holds weights of version {message.fields['holds']} instead of {version}"
                )
            return messages.read_completions(message, requests, version, in_flight=in_flight)
        except (
            OSError,
            HTTPException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise ServerLost(f"{self.url}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
            self._asking = None

    def hang_up(self) -> None:
        """End what `complete` waits for, from another thread."""
        asking = self._asking
        if asking is not None and asking.sock is not None:
            asking.sock.shutdown(2)

    def _message(
        self, path: str, timeout: float | None = None, method: str = "GET"
    ) -> messages.Message:
        connection = self._connection(timeout)
        try:
            connection.request(method, path, headers=self._headers())
            return self._next(self._answer(connection))
        except (OSError, HTTPException, ValueError, LookupError) as error:
            raise ServerLost(f"{self.url}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _connection(self, timeout: float | None = None) -> HTTPConnection:
        url = urlsplit(self.url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        return kind(url.hostname or "", url.port, timeout=timeout or self._timeout)

    def _answer(self, connection: HTTPConnection) -> HTTPResponse:
        answer = connection.getresponse()
        if answer.status != 200:
            raise ServerLost(f"{self.url}: answers {answer.status} {answer.reason}")
        return answer

    def _next(self, answer: HTTPResponse) -> messages.Message:
        """Read a message. Raises an error for people if it is one."""
        message = messages.read(cast(BinaryIO, answer))
        if message is None:
            raise ServerLost(f"{self.url}: ended without an answer")
        error = messages.error_of(message.fields)
        if error is not None:
            raise error
        return message


class Upload:
    """Weights on their way to a server."""

    def __init__(self, server: Server, connection: HTTPConnection) -> None:
        self._server, self._connection = server, connection

    def send(self, message: Sequence[bytes]) -> None:
        """Send a message of `burnish.rollout.messages`. Raises `ServerLost`."""
        try:
            for part in message:
                if len(part):
                    self._connection.send(b"%x\r\n" % len(part))
                    self._connection.send(part)
                    self._connection.send(b"\r\n")
        except OSError as error:
            raise ServerLost(f"{self._server.url}: {error}") from error

    def finish(self) -> None:
        """Wait until the server holds the weights. Raises `ServerLost`, or the server's own error."""
        self.send(messages.LAST)
        try:
            self._connection.send(b"0\r\n\r\n")
            self._server._next(self._server._answer(self._connection))
        except (OSError, HTTPException, ValueError) as error:
            raise ServerLost(f"{self._server.url}: {type(error).__name__}: {error}") from error
        finally:
            self._connection.close()


class ServedGenerator:
    """Generators in other processes; a `Generator`."""

    central = True

    def __init__(
        self,
        servers: Sequence[Server],
        specs: Sequence[TensorSpec],
        layout: Layout,
        *,
        in_flight: bool = False,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`servers` are the same on all ranks; their models have tensors of `specs`. `close` calls `end`. With `in_flight` they take
        new weights while they generate."""
        self._end, self._in_flight = end, in_flight
        self._servers, self._specs, self._layout = tuple(servers), tuple(specs), layout
        self._fed = self._servers[layout.rank :: layout.world]
        self._lost: dict[str, str] = {}
        self._gather: Gather | None = None
        self._version: int | None = None

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`.

        Deals requests by length among the servers. Those of a server that gets lost go to the others. Raises `BurnishError` if
        none is left.
        """
        if self._version is None:
            raise UsageError("the servers have no weights", do="call load_weights first")
        found: dict[int, list[Completion]] = {}
        while waiting := [number for number in range(len(requests)) if number not in found]:
            alive = [server for server in self._servers if server.url not in self._lost]
            if not alive:
                raise self._all_lost()
            lengths = np.array([len(requests[number].token_ids) for number in waiting])
            dealt = share_evenly(lengths, min(len(alive), len(waiting)))
            shares = {
                server: [waiting[place] for place in places]
                for server, places in zip(alive, dealt, strict=False)
            }
            found |= self._asked(shares, requests, sampling, watch)
        return [found[number] for number in range(len(requests))]

    def _asked(
        self,
        shares: Mapping[Server, Sequence[int]],
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None,
    ) -> dict[int, list[Completion]]:
        """Ask all servers at the same time, each for its share; return the completions by request."""
        found: dict[int, list[Completion]] = {}
        errors: list[BurnishError] = []
        told: queue.SimpleQueue[int] = queue.SimpleQueue()
        version = self._version or 0

        def ask(server: Server, share: Sequence[int]) -> None:
            mine = [requests[number] for number in share]
            try:
                groups = server.complete(mine, sampling, version, told, in_flight=self._in_flight)
                found.update(zip(share, groups, strict=True))
            except ServerLost as error:
                self._lose(server, error)
            except BurnishError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=each, daemon=True) for each in shares.items()]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
                    _tell(told, watch)
        except BaseException:
            for server in shares:
                server.hang_up()
            raise
        _tell(told, watch)
        if errors:
            raise errors[0]
        return found

    def load_weights(self, weights: Publication, version: int) -> None:
        """See `Generator.load_weights`. A lost server that answers again takes part again."""
        have, before = list(weights.changing), self._lost
        if self._gather is None:
            self._gather = Gather(have, self._specs, self._layout)
        self._lost = {}
        uploads: dict[Server, Upload] = {}
        for server in self._fed:
            with self._losing(server):
                if server.url in before:
                    server.about(_PROBE_SECONDS)
                uploads[server] = server.upload(version)
        for piece in self._gather.run(have):
            message = messages.encode_shard(piece) if uploads else []
            for server in [server for server in uploads if server.url not in self._lost]:
                with self._losing(server):
                    uploads[server].send(message)
        for server in [server for server in uploads if server.url not in self._lost]:
            with self._losing(server):
                uploads[server].finish()
        for theirs in gather_objects(self._lost, self._layout):
            self._lost = theirs | self._lost
        self._version = version
        if self._layout.is_main:
            for url in self._lost.keys() - before:
                log.warning("a generator is lost, and others take over: %s", self._lost[url])
            for url in before.keys() - self._lost:
                log.warning("the generator at %s is back", url)

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`: those of the servers that this rank sends weights to."""
        for server in self._fed:
            with self._losing(server):
                yield from server.checksums()

    def release(self) -> None:
        """See `Generator.release`."""
        for server in self._fed:
            with self._losing(server):
                if server.url not in self._lost:
                    server.release()

    def close(self) -> None:
        """End the generator's use, and what a thread still waits for."""
        self._lost = {server.url: f"{server.url}: no longer asked" for server in self._servers}
        for server in self._servers:
            server.hang_up()
        self._end()

    @contextmanager
    def _losing(self, server: Server) -> Iterator[None]:
        try:
            yield
        except ServerLost as error:
            self._lost[server.url] = str(error)

    def _lose(self, server: Server, error: ServerLost) -> None:
        if server.url not in self._lost:
            self._lost[server.url] = str(error)
            log.warning("a generator is lost, and others take over: %s", error)

    def _all_lost(self) -> BurnishError:
        return BurnishError(
            "no generator is left",
            have="; ".join(self._lost.values()),
            want="one that answers",
            do="start the same command again, with servers that run: it goes on from the newest checkpoint",
        )


def _tell(told: queue.SimpleQueue[int], watch: Watch | None) -> None:
    ended = 0
    while not told.empty():
        ended += told.get()
    if watch is not None:
        watch(ended)
