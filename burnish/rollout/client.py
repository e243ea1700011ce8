"""A generator in other processes: servers share the requests, and take over from a lost server."""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
import torch

from burnish.boxes.gather import Gather
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.boxes.transfer import accelerator_of
from burnish.data.balance import share_evenly
from burnish.distributed.collectives import any_rank, from_main, gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.files.strict_json import clipped
from burnish.records import Completion, Request
from burnish.rollout import messages
from burnish.rollout.base import Generator, RunningRequest, Sampling, Watch
from burnish.rollout.connections import PacedResponse, connection_to
from burnish.rollout.staging import Staging, is_here, make_stagings
from burnish.rollout.weight_group import FAILURES, GroupMember, nccl_facts

log = logging.getLogger("burnish")

# Seconds between looks for a signal while servers generate.
_POLL_SECONDS = 0.1
# Seconds that a signal may take to reach this process after it has ended all servers.
_GRACE_SECONDS = 2.0
# Seconds for a server to send its partial completions.
_PARTIAL_SECONDS = 10.0
# Most characters of what a lost server says.
_WHY_CHARACTERS = 500
_FAILURES = (OSError, HTTPException, *messages.NONSENSE)

T = TypeVar("T")
Revive = Callable[[Sequence[str], Sequence[str]], Mapping[str, tuple[str, str]]]
"""Gets the URLs of lost servers and of the others. Returns a replacement's URL and token by the lost server's URL. Never raises."""


class ServerLost(Exception):
    """A server is gone, hangs, or sends invalid messages."""


@dataclass
class Upload:
    """Weights on their way to a server."""

    connection: HTTPConnection
    answer: PacedResponse | None = None
    """What the server says before it has all weights."""
    staging: Staging | None = None
    """Memory that the server maps, or that is broadcast to it; without it, weights go over the connection."""
    member: GroupMember | None = None
    """This process's part in the group that `staging` is broadcast to."""
    unread: int = 0
    """Waves in that memory that the server has not read yet."""


class Server:
    """A client of one server. Its methods raise `ServerLost`."""

    def __init__(self, url: str, token: str, timeout: float, vocabulary: int = 0) -> None:
        """The server counts as lost if it sends no whole message in `timeout` seconds.

        Token ids of its completions have to be below `vocabulary`.
        """
        self.url = url
        self.timeout = timeout
        self.vocabulary = vocabulary
        self._token = token
        self._headers = {"Authorization": f"Bearer {token}"}
        self._completing: HTTPConnection | None = None
        """The connection of the running `complete`, which `hang_up` shuts."""
        self._member: GroupMember | None = None
        """This process's part in a group with the server, for weights."""
        self._joins = True
        """Whether no such group has failed."""
        self._way = ""
        """How weights go to the server, in words."""

    def about(self) -> dict[str, Any]:
        """Return the server's description: model, engine, version."""
        return dict(self._message("/").fields)

    def checksums(self) -> list[tuple[TensorSpec, str]]:
        """Return its generator's checksums."""
        with self.losing():
            return [
                (TensorSpec(name, tuple(shape), getattr(torch, dtype)), checksum)
                for name, shape, dtype, checksum in self._message("/checksums").fields["checksums"]
            ]

    def release(self) -> None:
        """Free the server's device memory."""
        self._message("/release", method="POST")

    def forget(self) -> None:
        """Free what the server keeps of conversations."""
        self._message("/forget", method="POST")

    @contextmanager
    def upload(
        self,
        version: int,
        owner: str = "",
        *,
        anew: bool = False,
        stagings: Sequence[Staging] = (),
    ) -> Iterator[Upload]:
        """Start to send `owner`'s weights, with `anew` fixed ones first. Yield the upload for `send` and `finish`.

        Of `stagings`, a server on this machine maps the first that it can. Another one gets them by broadcasts.
        """
        with closing(self._connection()) as connection:
            upload = Upload(connection)
            with self.losing():
                connection.connect()
                flags = "&anew=1" * anew + "&staging=1" * bool(stagings)
                connection.putrequest("PUT", f"/weights?version={version}&owner={owner}{flags}")
                connection.putheader("Authorization", self._headers["Authorization"])
                connection.putheader("Transfer-Encoding", "chunked")
                connection.endheaders()
                if stagings:
                    self._offer(upload, stagings)
                else:
                    self._take_way("HTTP", is_worse=False)
            yield upload

    def _offer(self, upload: Upload, stagings: Sequence[Staging]) -> None:
        """Agree with the server on a way for weights, as `burnish.rollout.weight_group` says."""
        fields = {
            "offers": [each.offer for each in stagings],
            "group": self._member.id if self._member else "",
            "joins": self._joins,
            "nccl": nccl_facts(stagings[0].device),
        }
        self.send(upload, messages.encode(fields))
        upload.answer = self.answer(upload.connection)
        agreed = self.next(upload.answer).fields
        if agreed["group"] is not None and (
            self._member is None or agreed["group"]["id"] != self._member.id
        ):
            why = self._join(upload, agreed["group"], stagings[agreed["mapped"]].device)
            self.send(upload, messages.encode({"why": why}))
            agreed = self.next(upload.answer).fields
            self._joins = agreed["group"] is not None
        if agreed["group"] is None:
            self.leave()
        else:
            upload.member = self._member
        way = "HTTP"
        if agreed["mapped"] is not None:
            upload.staging = stagings[agreed["mapped"]]
            kind = upload.staging.device.type
            way = upload.member.kind if upload.member else f"shared memory ({kind})"
        is_worse = not self._joins or (way == "HTTP" and is_here(upload.connection.sock))
        self._take_way(way, clipped(agreed["why"], _WHY_CHARACTERS), is_worse=is_worse)

    def _join(self, upload: Upload, invitation: Mapping[str, Any], device: torch.device) -> str:
        """Join a server's group; return why this process cannot, or nothing."""
        self.leave()
        there = upload.connection.sock.getpeername()[0]
        here = upload.connection.sock.getsockname()[0]
        try:
            self._member = GroupMember(invitation, 0, device, there, here, self.timeout)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _take_way(self, way: str, why: str = "", *, is_worse: bool) -> None:
        """Name the way of weights when it changes."""
        if way != self._way:
            self._way = way
            level = logging.WARNING if is_worse else logging.INFO
            log.log(level, "weights go to %s over %s%s", self.url, way, why and f": {why}")

    def leave(self) -> None:
        """End the group with the server, if there is one."""
        if self._member is not None:
            self._member.leave()
            self._member = None

    def broadcast(self, upload: Upload) -> None:
        """Begin to broadcast what the upload's memory has last handed over, if there is a group."""
        if upload.member is not None and upload.staging is not None:
            with self.losing():
                upload.member.send(upload.staging.handed_over)

    def send(self, upload: Upload, message: messages.Parts) -> None:
        """Send a message of an upload."""
        connection = upload.connection
        with self.losing():
            connection.sock.settimeout(self.timeout)
            try:
                for part in message:
                    if len(part):
                        connection.send(b"%x\r\n" % len(part))
                        connection.send(part)
                        connection.send(b"\r\n")
            except ConnectionError:
                while upload.answer is not None:  # raises what the server said before it hung up
                    self.next(upload.answer)
                raise

    def wait_read(self, upload: Upload, unread: int) -> None:
        """Wait until the server has read all waves in shared memory but the last `unread`. Raises its own error too."""
        with self.losing():
            while upload.unread > unread:
                self.next(cast(PacedResponse, upload.answer)).fields["read"]
                upload.unread -= 1
                if upload.member is not None:
                    upload.member.acknowledge(upload.unread)

    def finish(self, upload: Upload) -> None:
        """Wait until the server holds the weights. Raises its own error too."""
        with self.losing():
            upload.connection.send(b"0\r\n\r\n")
            self.wait_read(upload, 0)
            with closing(upload.answer or self.answer(upload.connection)) as answer:
                self.next(answer)

    def complete(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int,
        progress: queue.SimpleQueue[int],
        owner: str = "",
        *,
        in_flight: bool = False,
    ) -> list[list[Completion]]:
        """Return completions; put into `progress` how many have ended."""
        encoded = messages.encode_requests(requests, sampling, version, owner, in_flight=in_flight)
        with self.losing(), ExitStack() as stack:
            self._completing = stack.enter_context(closing(self._connection()))
            answer = self._ask(self._completing, "POST", "/completions", b"".join(encoded))
            stack.enter_context(closing(answer))
            running = sum(request.samples for request in requests)
            while "ended" in (message := self.next(answer)).fields:
                ended = message.fields["ended"]
                if type(ended) is not int or not 0 <= ended <= running:
                    raise ValueError(f"{clipped(str(ended))} of {running} completions have ended")
                running -= ended
                progress.put(ended)
            return messages.read_completions(
                message, requests, sampling, version, self.vocabulary, in_flight=in_flight
            )

    def so_far(self, owner: str) -> list[RunningRequest]:
        """Return the partial completions for `owner`."""
        with self.losing(), ExitStack() as stack:
            connection = stack.enter_context(closing(self._connection(_PARTIAL_SECONDS)))
            answer = stack.enter_context(closing(self._ask(connection, "GET", "/completions")))
            head = self.next(answer)
            if head.fields.get("owner") != owner:
                return []
            requests, sampling, version = messages.read_requests(head)
            message = self.next(answer)
            groups = messages.read_completions(
                message, requests, sampling, version, self.vocabulary, in_flight=True, partial=True
            )
            return [RunningRequest(sampling, *each) for each in zip(requests, groups, strict=True)]

    def hang_up(self) -> None:
        """End `complete` from another thread."""
        sock = None if self._completing is None else self._completing.sock
        if sock is not None:
            with suppress(OSError):  # the request has ended
                sock.shutdown(socket.SHUT_RDWR)

    def _message(self, path: str, method: str = "GET") -> messages.Message:
        with self.losing(), ExitStack() as stack:
            connection = stack.enter_context(closing(self._connection()))
            return self.next(stack.enter_context(closing(self._ask(connection, method, path))))

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Raise `ServerLost` for errors of the network or server."""
        try:
            yield
        except _FAILURES as error:
            raise self._lost_error(f"{type(error).__name__}: {error}") from error

    def _lost_error(self, why: str) -> ServerLost:
        """Return the error, without the token, which a server could send back."""
        return ServerLost(
            f"{self.url}: {clipped(why.replace(self._token, '***'), _WHY_CHARACTERS)}"
        )

    def _connection(self, timeout: float | None = None) -> HTTPConnection:
        return connection_to(urlsplit(self.url), timeout or self.timeout)

    def _ask(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> PacedResponse:
        connection.request(method, path, body, self._headers)
        return self.answer(connection)

    def answer(self, connection: HTTPConnection) -> PacedResponse:
        """Return a response with status 200."""
        answer = connection.getresponse()
        if answer.status != 200:
            answer.close()
            raise self._lost_error(f"answers {answer.status} {answer.reason}")
        return cast(PacedResponse, answer)

    def next(self, answer: PacedResponse) -> messages.Message:
        """Read a message, or raise the server's own error."""
        answer.expect_message()
        message = messages.read_message(cast(BinaryIO, answer))
        if message is None:
            raise self._lost_error("ended without an answer")
        error = messages.error_of(message.fields)
        if error is not None:
            raise error
        if "failed" in message.fields:
            raise self._lost_error(f"it failed: {message.fields['failed']}")
        return message


class ServedGenerator(Generator):
    """Generates with servers in other processes."""

    called_by_rank0 = True

    def __init__(  # noqa: PLR0913
        self,
        servers: Sequence[Server],
        specs: Sequence[TensorSpec],
        layout: Layout,
        *,
        fixed: Sequence[TensorSpec] = (),
        in_flight: bool = False,
        make_room: Callable[[], None] = lambda: None,
        revive: Revive = lambda lost, others: {},
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`servers`, the same on all ranks, get tensors of `specs` at each load and `fixed` ones once. Collective.

        At each load, each rank calls `make_room`, and `revive` if a server is lost.
        """
        self._revive = revive
        self._end = end
        self._in_flight = in_flight
        self._make_room = make_room
        self._servers = tuple(servers)
        self._layout = layout
        self._loaded = self._servers
        """Servers that got the last weights. A replacement gets no requests before it has weights."""
        self._specs = tuple(specs)
        self._fixed = tuple(fixed)
        self._have_fixed: set[Server] = set()
        """Servers that have the fixed weights."""
        self._lost: dict[Server, str] = {}
        """Why each lost server is lost. On rank 0 the thread that draws may add one at any time."""
        self._owner = from_main(secrets.token_hex(8), layout)  # evaluations may share the servers
        self._gather: Gather | None = None
        self._stagings: list[Staging] | None = None
        """Memory for weights that servers on this machine map."""
        self._version: int | None = None
        self._ended: list[RunningRequest] = []
        self._share_of: dict[tuple[int, int], int] = {}
        """The share of each conversation, by prompt and sample: a server keeps what it read."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`. Raises `BurnishError` if no server is left.

        Deals requests by length, a share to each server, before any server begins, so timing changes no bit. With `in_flight`, where it
        does, servers take smaller shares from one queue. Another server gets a lost server's whole share and computes the same.
        """
        if self._version is None:
            raise UsageError("the servers have no weights", do="call load_weights first")
        self._ended = []
        shares = _shares(requests, len(self._servers), in_flight=self._in_flight)
        if sampling.keeps and not self._in_flight:
            shares = self._kept_shares(requests, shares)
        completions: dict[int, list[Completion]] = {}
        while waiting := [share for share in enumerate(shares) if {*share[1]} - {*completions}]:
            servers = self._loaded
            alive = [server for server in servers if server not in self._lost]
            if not alive:
                raise self._none_left(watch)
            shared = deque[list[int]]()
            dealt = {server: shared if self._in_flight else deque[list[int]]() for server in alive}
            for number, share in waiting:
                own = servers[number % len(servers)]
                dealt[own if own in dealt else alive[number % len(alive)]].append(share)
            completions |= self._ask_servers(dealt, requests, sampling, watch)
        return [completions[number] for number in range(len(requests))]

    def _kept_shares(
        self, requests: Sequence[Request], shares: Sequence[list[int]]
    ) -> list[list[int]]:
        """Return `shares`, but leave conversations where they began."""
        by_server: list[list[int]] = [[] for _ in self._servers]
        for number, share in enumerate(shares):
            for place in share:
                request = requests[place]
                own = self._share_of.get((request.prompt_key, request.first_sample), number)
                by_server[own].append(place)
                for sample in range(request.first_sample, request.first_sample + request.samples):
                    self._share_of[request.prompt_key, sample] = own
        return [sorted(share) for share in by_server]

    def _ask_servers(
        self,
        dealt: Mapping[Server, deque[list[int]]],
        requests: Sequence[Request],
        sampling: Sampling,
        watch: Watch | None,
    ) -> dict[int, list[Completion]]:
        completions: dict[int, list[Completion]] = {}
        errors: list[Exception] = []
        progress: queue.SimpleQueue[int] = queue.SimpleQueue()
        interrupted = threading.Event()
        version = self._version or 0

        def ask(server: Server, shares: deque[list[int]]) -> None:
            share: list[int] = []
            try:
                # A server that was lost meanwhile may lack the newest weights.
                while not errors and server not in self._lost and (share := next_of(shares) or []):
                    batch = [requests[number] for number in share]
                    groups = server.complete(
                        batch, sampling, version, progress, self._owner, in_flight=self._in_flight
                    )
                    completions.update(zip(share, groups, strict=True))
                    ended = zip(batch, groups, strict=True)
                    self._ended.extend(RunningRequest(sampling, *each) for each in ended)
            except ServerLost as error:
                # Servers with weights in flight share the queue, so another one takes it at once.
                shares.appendleft(share)
                if not interrupted.is_set():
                    self._lose(server, str(error))
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        try:
            in_threads(
                [partial(ask, *each) for each in dealt.items()], partial(_report, progress, watch)
            )
        except BaseException:
            interrupted.set()
            for server in dealt:
                server.hang_up()
            raise
        if errors:
            raise errors[0]
        return completions

    def so_far(self) -> list[RunningRequest]:
        """See `Generator.so_far`. Any thread may call it. It skips silent servers."""

        def partial_of(server: Server) -> list[RunningRequest]:
            try:
                return server.so_far(self._owner)
            except (ServerLost, BurnishError) as error:
                log.warning("a generator does not send its partial completions: %s", error)
                return []

        alive = [server for server in self._loaded if server not in self._lost]
        with ThreadPoolExecutor(max(1, len(alive))) as pool:
            running = [request for parts in pool.map(partial_of, alive) for request in parts]
        return [*running, *self._ended]

    @property
    def _fed(self) -> list[Server]:
        """Return the live servers that this rank sends weights to."""
        own = self._servers[self._layout.rank :: self._layout.world]
        return [server for server in own if server not in self._lost]

    def load_weights(self, weights: Publication, version: int) -> None:
        """See `Generator.load_weights`."""
        self._make_room()  # servers on this device take memory for weights, and later for their caches
        shards = list(weights.changing)
        if self._gather is None:
            self._gather = Gather(shards, self._specs, self._layout)
        self._revive_lost()
        new = set(self._fed) - self._have_fixed if self._fixed else set[Server]()
        uploads: dict[Server, Upload] = {}
        if self._stagings is None and self._fed:
            specs = [*self._specs, *self._fixed]
            self._stagings = make_stagings(specs, accelerator_of(shards))
        stagings = self._stagings or []
        with ExitStack() as stack:
            for server in self._fed:
                with self._losing(server):
                    upload = server.upload(
                        version, self._owner, anew=server in new, stagings=stagings
                    )
                    uploads[server] = stack.enter_context(upload)
            if uploads:
                used = [upload.staging for upload in uploads.values()]
                self._stagings = [staging for staging in stagings if staging in used]
            if any_rank(bool(new), self._layout):
                fixed = list(weights.fixed)
                pieces = Gather(fixed, self._fixed, self._layout).run(fixed)
                self._send(pieces, {server: uploads[server] for server in uploads.keys() & new})
            self._send(self._gather.run(shards), uploads)
            for server in self._fed:
                with self._losing(server):
                    server.finish(uploads[server])
        self._make_room()
        self._have_fixed.update(self._fed)
        self._share_lost()
        self._loaded = self._servers
        self._version = version

    def _send(self, pieces: Iterator[Shard], uploads: Mapping[Server, Upload]) -> None:
        """Send pieces of weights, then `LAST`. Collective."""
        by_staging: dict[Staging | None, dict[Server, Upload]] = {}
        for server, upload in uploads.items():
            by_staging.setdefault(upload.staging, {})[server] = upload
        for piece in pieces:
            for staging, some in by_staging.items():
                if staging is None:
                    self._send_message(messages.encode_shard(piece), some)
                else:
                    self._stage(piece, staging, some)
        for staging, some in by_staging.items():
            if staging is not None:
                self._hand_over(staging, some)
        self._send_message(messages.LAST, uploads)

    def _send_message(self, message: messages.Parts, uploads: Mapping[Server, Upload]) -> None:
        for server in uploads.keys() & self._fed:
            with self._losing(server):
                server.send(uploads[server], message)

    def _stage(self, piece: Shard, staging: Staging, uploads: Mapping[Server, Upload]) -> None:
        """Write a piece into memory that the servers map."""
        for part in staging.parts(piece):
            if not staging.has_room(part):
                self._hand_over(staging, uploads)
            if staging.is_empty:
                for server in uploads.keys() & self._fed:
                    with self._losing(server):
                        server.wait_read(uploads[server], 1)  # the other buffer
            staging.write(part)

    def _hand_over(self, staging: Staging, uploads: Mapping[Server, Upload]) -> None:
        """Tell the servers what the current buffer holds."""
        if staging.is_empty:
            return
        self._send_message(staging.turn(), uploads)
        for server in uploads.keys() & self._fed:
            with self._losing(server):
                server.broadcast(uploads[server])
        for upload in uploads.values():
            upload.unread += 1

    def _share_lost(self) -> list[str]:
        """Tell all ranks which servers are lost; return their urls. Collective."""
        lost_here = {
            server.url: self._lost[server] for server in self._servers if server in self._lost
        }
        lost: dict[str, str] = {}
        for lost_there in gather_objects(lost_here, self._layout):
            lost = lost_there | lost
        for server in self._servers:
            if server.url in lost:
                self._lose(server, lost[server.url])
                server.leave()
        return list(lost)

    def _revive_lost(self) -> None:
        """Replace lost servers as far as possible. Collective."""
        lost = self._share_lost()
        if not lost:
            return
        revived = dict[str, tuple[str, str]]()
        others = [server.url for server in self._servers if server.url not in lost]
        for replacements in gather_objects(self._revive(lost, others), self._layout):
            revived |= replacements
        self._servers = tuple(
            Server(*revived[server.url], server.timeout, server.vocabulary)
            if server.url in revived
            else server
            for server in self._servers
        )
        for url, _ in revived.values() if self._layout.is_main else ():
            log.warning("the generator at %s takes part again", url)

    def forget(self) -> None:
        """See `Generator.forget`."""
        self._share_of = {}
        for server in self._loaded:
            if server not in self._lost:
                with self._losing(server):
                    server.forget()

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`: of the servers that this rank feeds."""
        for server in self._fed:
            with self._losing(server):
                yield from server.checksums()

    def release(self) -> None:
        """See `Generator.release`."""
        for server in self._fed:
            with self._losing(server):
                server.release()

    def close(self) -> None:
        """Stop using the servers, and interrupt waiting threads."""
        for server in {*self._servers, *self._loaded}:
            self._lost[server] = f"{server.url}: no longer asked"
            server.hang_up()
            server.leave()
        for staging in self._stagings or ():
            staging.close()
        self._end()

    @contextmanager
    def _losing(self, server: Server) -> Iterator[None]:
        try:
            yield
        except (ServerLost, BurnishError) as error:
            self._lose(server, str(error))
            server.leave()

    def _lose(self, server: Server, why: str) -> None:
        if server not in self._lost:
            self._lost[server] = why
            if self._layout.is_main:
                log.warning("a generator is lost, and others take over: %s", why)

    def _none_left(self, watch: Watch | None) -> BurnishError:
        for _ in range(round(_GRACE_SECONDS / _POLL_SECONDS) if watch is not None else 0):
            _report(queue.SimpleQueue(), watch)  # raises if a signal ended all servers
            time.sleep(_POLL_SECONDS)
        return BurnishError(
            "no generator is left",
            have="; ".join(self._lost[each] for each in self._loaded if each in self._lost),
            want="one that answers",
            do="start the same command again, with servers that run: it goes on from the newest checkpoint",
        )


def _shares(requests: Sequence[Request], servers: int, *, in_flight: bool) -> list[list[int]]:
    """Divide requests as `generate` says."""
    if in_flight:
        unassigned = deque(range(len(requests)))
        shares = list[list[int]]()
        while unassigned:
            # Shares shrink toward the end, so that no server computes long while others have nothing.
            count = -(-len(unassigned) // (2 * servers - 1))
            shares.append([unassigned.popleft() for _ in range(count)])
        return shares
    lengths = np.array([max(1, len(request.token_ids)) for request in requests])
    count = min(servers, len(requests))
    server_of = share_evenly(lengths, count) if requests else lengths
    return [np.flatnonzero(server_of == server).tolist() for server in range(count)]


def next_of(items: deque[T]) -> T | None:
    """Take the next item that threads share, or None."""
    try:
        return items.popleft()
    except IndexError:
        return None


def in_threads(works: Sequence[Callable[[], None]], meanwhile: Callable[[], None]) -> None:
    """Run functions in threads; call `meanwhile` often, and once at the end."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            meanwhile()
    meanwhile()


def _report(progress: queue.SimpleQueue[int], watch: Watch | None) -> None:
    ended = 0
    while not progress.empty():
        ended += progress.get()
    if watch is not None:
        watch(ended)
