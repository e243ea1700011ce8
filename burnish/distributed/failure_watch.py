"""Stop all ranks within seconds when one fails or dies, and name it.

A collective whose peer is gone fails with an error about sockets (gloo) or hangs (NCCL). So every rank holds one TCP connection to
a relay thread in rank 0. The kernel closes a killed rank's connection; TCP keep-alive closes a lost machine's.

Messages are JSON objects, one per line. A rank introduces itself with a token from the store; the relay
replies with an empty line. A rank that stands still sends `{"alarm": SECONDS}`. The relay may send
`{"ask": true}`; each rank answers where it is. A leaving rank sends `{"reason": null}`, or its error's text and last log lines.
The relay sends every rank the first `Failure`, or `{"done": true}` when rank 0 leaves.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.distributed_c10d import Store

from burnish.distributed.layout import Layout
from burnish.distributed.stall import (
    NO_LIMITS,
    SHARE_OF_TIMEOUT,
    Answer,
    Process,
    StallLimits,
    Watchdog,
    end_silent,
    likely_cause,
    place_of_work,
    process_state,
    publish,
    stack_of,
    stall_report,
)
from burnish.errors import BurnishError, StoppedError
from burnish.tracking import logs

# Seconds that a rank has to leave after it hears of a failure. Then its process is ended.
_GRACE_SECONDS = 5.0
# The same after a stall, in which no rank can leave by itself.
_HELD_UP_SECONDS = 1.0
# Seconds that a rank with a broken collective waits to hear which rank failed.
_VERDICT_SECONDS = 2.0
_CONNECT_SECONDS = 60.0
_AGAIN_SECONDS = 0.5
# Seconds of silence before TCP sends the first probe, seconds between probes, and number of probes.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Connections that may wait to be accepted; seconds before the relay tries again when descriptors have run out.
_BACKLOG = 4096
_FULL_SECONDS = 1.0
# Most bytes of a message, and most characters of each log line in it.
_LONGEST_LINE = 1 << 20
_LONGEST_SHOWN = 500

_log = logging.getLogger(__name__)


class FailureWatch:
    """This rank's connection to the relay, until `leave`.

    A rank that has not left five seconds after a failure is killed, since its GPU may wait for a lost rank.
    """

    def __init__(
        self, layout: Layout, host: str, store: Store, limits: StallLimits = NO_LIMITS
    ) -> None:
        """Connect to rank 0 on the machine `host`. All ranks share `store` and `limits`."""
        self._rank = layout.rank
        self._failure: Failure | None = None
        self._failure_known = threading.Event()
        self._left = threading.Event()
        self._traceback = ""
        """Of the error that this rank reported."""
        self._sending = threading.Lock()
        self._main = threading.get_ident()
        self._me = {"rank": layout.rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._relay: _Relay | None = None
        if layout.rank == 0:
            local = layout.local_world == layout.world
            self._relay = _Relay(limits, local=local)
            store.set("watch", json.dumps(self._relay.contact | self._me))
            self._relay.start()
        self._contact = json.loads(store.get("watch"))
        self._socket = self._connect(host)
        self._unanswered: float | None = None
        self._limits, self._watchdog = limits, Watchdog(limits, self._alarm)
        self._listener = threading.Thread(target=self._listen, name="burnish-watch", daemon=True)
        self._listener.start()
        self._watchdog.start()

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Report an error of the block. If another rank failed first, raise its failure instead."""
        try:
            yield
        except BaseException as error:
            # torch raises such errors when a peer is gone
            may_be_a_peers = isinstance(error, RuntimeError | OSError)
            failure = self.failure(_VERDICT_SECONDS if may_be_a_peers else 0.0)
            self.report(error)
            if failure is not None and not isinstance(error, BurnishError):
                work = list(traceback.walk_tb(error.__traceback__))
                cause = self._error(failure, place_of_work(work))
                logs.add(str(cause))
                raise cause from error
            raise

    def failure(self, wait_seconds: float) -> Failure | None:
        """Return another rank's failure, waiting `wait_seconds` at most."""
        self._failure_known.wait(wait_seconds)
        first = self._failure
        return None if first is None or (first.rank == self._rank and not first.still) else first

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank failed. All ranks raise a `StoppedError`, so it is not reported."""
        if not isinstance(error, StoppedError):
            self._traceback = "".join(traceback.format_exception(error))
            ours = isinstance(error, BurnishError)
            reason = str(error) if ours else f"{type(error).__name__}: {error}"
            lines = [line[:_LONGEST_SHOWN] for line in logs.last_lines()]
            self._send({"reason": reason, "lines": lines})

    def leave(self) -> None:
        """Disconnect, with a goodbye unless this rank reported a failure."""
        self._left.set()
        self._watchdog.stop()
        if not self._traceback:
            self._send({"reason": None})
        with suppress(OSError):  # the relay has closed the connection
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._relay is not None:
            self._relay.join(_GRACE_SECONDS)
        self._listener.join(_GRACE_SECONDS)
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError), self._sending:  # rank 0 is gone, which every rank notices
            self._socket.sendall(_line(message))

    def _alarm(self, still: float) -> None:
        """Tell the relay that this rank stands still. If it does not ask back, blame rank 0."""
        now = time.monotonic()
        limits = self._limits
        self._unanswered = self._unanswered or now
        if now - self._unanswered > 2 * limits.pause + limits.answer and 0 < limits.stall <= still:
            main = Failure(0, self._contact["host"], self._contact["pid"])
            where = main.host, main.pid
            state = process_state(where) or "visible only on its machine"
            cause = f"rank 0 does not answer: its process is {state}"
            threading.Timer(_HELD_UP_SECONDS / 2, end_silent, (where,)).start()
            self._end_after(replace(main, reason=cause, still=still), is_published=False)
        self._send({"alarm": still})

    def _answer(self) -> None:
        self._unanswered = None
        self._send(self._watchdog.answer())
        # The device may hang, and this thread has to keep listening.
        threading.Thread(target=lambda: self._send(self._watchdog.memory()), daemon=True).start()

    def _connect(self, host: str) -> socket.socket:
        address = (self._contact["address"] or host, self._contact["port"])
        try:
            connection = introduced(address, {"token": self._contact["token"]} | self._me)
        except OSError as error:
            raise BurnishError(
                f"rank {self._rank} cannot connect to rank 0",
                have=f"{address[0]} port {address[1]}: {error}",
                want="ranks that reach each other on any port",
                do="check the firewall between the machines, and that MASTER_ADDR is the machine of rank 0",
            ) from error
        _prepare(connection)
        return connection

    def _listen(self) -> None:
        failure = self._next_failure()
        if failure is not None and not self._left.is_set():
            self._end_after(failure, is_published=failure.still > 0)

    def _end_after(self, failure: Failure, *, is_published: bool) -> None:
        """End this rank if it does not leave; `is_published`: the relay has published all stacks."""
        self._failure = self._failure or failure
        self._failure_known.set()
        if not self._left.wait(_HELD_UP_SECONDS if failure.still else _GRACE_SECONDS):
            stack = stack_of(sys._current_frames().get(self._main))
            error = self._error(self._failure, place_of_work(stack))
            if not is_published:
                _end_process(f"{error}\n{self._traceback}")
            publish(str(error), aloud=False)
            os._exit(1)

    def _error(self, failure: Failure, work: str) -> BurnishError:
        shows = self._rank == (1 if failure.rank == 0 else 0)
        lines = (failure.lines or logs.last_lines(failure.rank)) if shows else ()
        return replace(failure, lines=lines).error(self._rank, work)

    def _next_failure(self) -> Failure | None:
        """Return the relay's failure, None if rank 0 left. A closed connection means that it died."""
        with suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if "ask" not in message:
                    return None if "done" in message else Failure(**message)
                self._answer()
        return Failure(0, self._contact["host"], self._contact["pid"])


def _end_process(reason: str) -> None:
    text = f"\nburnish: {reason}\n  this rank did not stop by itself; the stacks of its threads:\n"
    for descriptor in filter(None, (2, logs.descriptor())):
        with suppress(OSError):  # standard error may be closed
            os.write(descriptor, text.encode())
            faulthandler.dump_traceback(descriptor)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first rank that failed, the text of its error ("" if killed), and the last lines of its log."""

    rank: int
    host: str
    pid: int
    reason: str = ""
    lines: Sequence[str] = ()
    still: float = 0.0
    """After a stall: the seconds in which no rank moved. `rank` probably held up the others."""

    def error(self, rank: int, work: str) -> BurnishError:
        """Return the error for `rank` to raise; `work` is where it was."""
        who = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        meanwhile = f"while rank {rank} was in {work}"
        shown = ["", "the last lines of its log:", *self.lines] if self.lines else [""]
        lines = "\n        ".join(shown)
        if self.still:
            error = BurnishError(
                f"nothing moved on any rank for {self.still:.0f} s",
                have=self.reason,
                do="see the report in the log of rank 0, then start the same command again: it resumes. "
                "distributed.stall_seconds sets how long a run may stand still",
            )
            error.printed_by_main = self.rank != 0  # a silent rank 0 cannot print it
            return error
        if self.reason:
            error = BurnishError(
                f"{who} failed {meanwhile}",
                have=self.reason + lines,
                do=f"see the traceback of rank {self.rank}",
            )
            error.printed_by_main = True
            return error
        return BurnishError(
            f"{who} died {meanwhile}",
            have="its connection closed without a message" + lines,
            do=f"look on {self.host} for what ended it: a signal, the out-of-memory killer, a crash",
        )


class _Relay(threading.Thread):
    """Tells every rank the first failure, until rank 0 leaves. Asks all where they are once one has stood still for long."""

    def __init__(self, limits: StallLimits, *, local: bool) -> None:
        super().__init__(name="burnish-relay", daemon=True)
        self._listener = _listen_on("localhost" if local else "")
        _prepare(self._listener)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self._failure: Failure | None = None
        self._ranks: dict[int, tuple[Process, asyncio.StreamWriter]] = {}
        self._limits = limits
        self._answers: dict[int, Answer] = {}
        self._full_answers = 0
        self._complete = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._has_reported = False
        address, port = self._listener.getsockname()[:2]
        self.contact = {"address": address if local else "", "port": port, "token": self._token}
        """The address, port and token with which ranks connect."""

    def run(self) -> None:
        with closing(self._listener):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        main_has_left = asyncio.Event()
        accepting = asyncio.create_task(self._accept(main_has_left))
        await main_has_left.wait()
        accepting.cancel()
        self._broadcast({"done": True})

    async def _accept(self, main_has_left: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as hearing:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                    _prepare(connection)
                    streams = await asyncio.open_connection(sock=connection, limit=_LONGEST_LINE)
                    hearing.create_task(self._serve_rank(*streams, main_has_left))
                except OSError as error:  # most often the peer hung up
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        _log.warning("rank 0 can open no more files: %s", error)
                        await asyncio.sleep(_FULL_SECONDS)

    async def _serve_rank(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        main_has_left: asyncio.Event,
    ) -> None:
        peer: Failure | None = None
        said_goodbye = False
        with closing(writer):
            # The connection was reset, or a stranger sent something else than our messages.
            with suppress(OSError, ValueError, KeyError, TypeError):
                async for line in reader:
                    message = json.loads(line)
                    if peer is None:
                        peer = self._greet(message, writer)
                    elif "reason" not in message:
                        self._hear(peer.rank, message)
                    else:
                        said_goodbye = True
                        if message["reason"] is not None:
                            reason = str(message["reason"]) or "no text"
                            self._fail(replace(peer, reason=reason, lines=message["lines"]))
            if peer is None:
                return
            self._ranks.pop(peer.rank, None)
            if not said_goodbye:
                self._fail(peer)
            if peer.rank == 0:
                main_has_left.set()

    def _greet(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Failure:
        """Return the failure to report if this rank dies. Raises `ValueError` for a stranger."""
        if not secrets.compare_digest(str(message.pop("token")), self._token):
            raise ValueError("not the run's token")
        peer = Failure(**message)
        self._ranks[peer.rank] = (peer.host, peer.pid), writer
        writer.write(b"\n")
        if self._failure is not None:
            writer.write(_line(asdict(self._failure)))
        return peer

    def _hear(self, rank: int, message: Answer) -> None:
        """Take an alarm, or a part of an answer."""
        if "alarm" not in message:
            self._answers.setdefault(rank, {}).update(message)
            self._full_answers += "memory" in message
            if self._full_answers >= len(self._ranks):
                self._complete.set()
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        """Ask all ranks; if they stand still, report on them, and end the run after `stall` seconds."""
        self._answers = {}
        self._complete = asyncio.Event()
        self._full_answers = 0
        there = {rank: process for rank, (process, _) in self._ranks.items()}
        self._broadcast({"ask": True})
        with suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), self._limits.answer)
        answers = {rank: each for rank, each in self._answers.items() if "still" in each}
        silent = sorted(there.keys() - answers.keys())
        still = sorted(each["still"] for each in answers.values()) or [0.0]
        shortest = still[0]
        timeout = self._limits.timeout
        ends = 0 < self._limits.stall <= shortest
        fails_soon = still[-1] >= SHARE_OF_TIMEOUT * timeout and shortest >= timeout / 2
        if ends or (fails_soon and not self._has_reported):
            self._has_reported = True
            states = {rank: process_state(there[rank]) for rank in silent}
            suspect, cause = likely_cause(answers, states)
            summary = f"nothing has moved on any rank for {shortest:.0f} s"
            if not ends:
                summary += f", and collectives fail after {timeout:g} s"
            publish(stall_report(f"{summary}: {cause}", answers, states, there))
            if ends:
                self._fail(Failure(suspect, *there[suspect], cause, still=shortest))
                end_silent(*(there[rank] for rank in silent))
        await asyncio.sleep(self._limits.pause)

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._broadcast(asdict(failure))

    def _broadcast(self, message: dict[str, Any]) -> None:
        line = _line(message)
        for _, writer in self._ranks.values():
            writer.write(line)


def introduced(address: tuple[str, int], rank: dict[str, Any]) -> socket.socket:
    """Connect to a relay and wait for its answer. Raises `OSError`."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    # When thousands connect at once, the kernel drops some connections that look open to the client.
    while True:
        with ExitStack() as opened, suppress(ConnectionResetError, BrokenPipeError):
            connection = opened.enter_context(socket.create_connection(address, _CONNECT_SECONDS))
            connection.sendall(_line(rank))
            if connection.recv(1):
                opened.pop_all()
                connection.settimeout(None)
                return connection
        if time.monotonic() > deadline:
            raise ConnectionResetError("the connection was dropped again and again")
        time.sleep(_AGAIN_SECONDS)


def _listen_on(host: str) -> socket.socket:
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.getaddrinfo(host or ("::" if dual else "0.0.0.0"), 0)[0][0]
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _prepare(connection: socket.socket) -> None:
    """Have a connection closed in forked children, and when the other machine is silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # some systems lack these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    reference = weakref.ref(connection)

    def close() -> None:
        inherited = reference()
        if inherited is not None and inherited.fileno() >= 0:
            os.close(inherited.detach())

    os.register_at_fork(after_in_child=close)
