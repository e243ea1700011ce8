"""Stop all ranks within seconds when one fails or dies, and say which one it was.

A collective whose peer is gone fails with a text about sockets (gloo) or hangs (NCCL). So every
rank holds one TCP connection to a relay thread in rank 0. A rank that raises an error reports it
before it leaves. The system closes the connection of a killed rank; TCP keep-alive closes that of a
lost machine. There are no heartbeats, so a rank that is busy, stopped in a debugger or asleep with
its laptop is never taken for dead. The launcher restarts the run, and the run resumes.

Messages are JSON objects, one a line. A rank introduces itself with a token from the store, so
strangers are not heard. When it leaves, it sends `{"reason": null}` or its error's text. The relay
sends every rank the first `Failure`, or `{"done": true}` when rank 0 leaves.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Self

from torch.distributed.distributed_c10d import Store

from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, StoppedError

_GRACE_SECONDS = 5.0
# A rank that hears of a failure has this long to leave; then its process is ended.
_VERDICT_SECONDS = 2.0
# A rank with a broken collective waits this long to hear whose fault it was.
_CONNECT_SECONDS = 60.0
_MACHINERY = ("torch", "contextlib", "threading", "burnish.distributed", "burnish.boxes")
# Frames of these modules do not tell what a rank was doing.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Seconds of silence before the other machine is asked, seconds between questions, questions.
_SEND_SECONDS = 1.0
_LONGEST_LINE = 1 << 20


@contextmanager
def watching(layout: Layout, host: str, store: Store) -> Iterator[FailureWatch | None]:
    """Connect to the relay during the block. A lone process has nobody to watch and gets None.

    `host` is the machine of rank 0; all ranks share `store`. A rank that does not leave the block
    within five seconds of a failure is ended, with the failure and the stacks of its threads on
    standard error, because nothing can interrupt a kernel that waits for a lost rank.
    """
    if layout.world == 1:
        yield None
        return
    watch = FailureWatch(layout, host, store)
    try:
        yield watch
    finally:
        watch.leave()


@contextmanager
def naming_failures(watch: FailureWatch | None, rank: int) -> Iterator[None]:
    """Report an error of the block to the other ranks.

    If another rank failed first, raise its failure in place of the broken collective's own error.
    """
    try:
        yield
    except BaseException as error:
        if watch is None:
            raise
        failure = watch.failure(_VERDICT_SECONDS if _may_be_a_peers(error) else 0.0)
        watch.report(error)
        if failure is not None and not isinstance(error, BurnishError):
            raise failure.error(rank, _work(traceback.walk_tb(error.__traceback__))) from error
        raise


class FailureWatch:
    """Hold this rank's connection to the relay."""

    def __init__(self, layout: Layout, host: str, store: Store) -> None:
        self._rank = layout.rank
        self._failure: Failure | None = None
        self._told = threading.Event()
        self._left = threading.Event()
        self._reported = False
        self._main = threading.get_ident()
        self._relay = Relay.start_for(layout, store) if layout.rank == 0 else None
        self._contact = json.loads(store.get("watch"))
        self._socket = self._connect(host)
        self._listener = threading.Thread(target=self._listen, name="burnish-watch", daemon=True)
        self._listener.start()

    def failure(self, wait_seconds: float) -> Failure | None:
        """Wait this long for another rank's failure. Return it, or None."""
        self._told.wait(wait_seconds)
        first = self._failure
        return None if first is None or first.rank == self._rank else first

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank failed. They reach an orderly stop by themselves."""
        if not isinstance(error, StoppedError):
            self._reported = True
            self._send({"reason": _reason(error)})

    def leave(self) -> None:
        """Say goodbye, unless this rank reported a failure, and close the connection."""
        self._left.set()
        if not self._reported:
            self._send({"reason": None})
        with suppress(OSError):  # the relay has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._relay is not None:
            self._relay.join(_GRACE_SECONDS)
        self._listener.join(_GRACE_SECONDS)
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # rank 0 is gone, which every rank notices
            send_line(self._socket, message)

    def _connect(self, host: str) -> socket.socket:
        address = (self._contact["address"] or host, self._contact["port"])
        try:
            connection = socket.create_connection(address, _CONNECT_SECONDS)
        except OSError as error:
            raise BurnishError(
                f"rank {self._rank} cannot connect to rank 0",
                have=f"{address[0]} port {address[1]}: {error}",
                want="ranks that reach each other on any port",
                do="check the firewall between the machines, and that MASTER_ADDR is the machine of rank 0",
            ) from error
        connection.settimeout(None)
        keep_alive(connection)
        close_when_forked(connection)
        me = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()}
        send_line(connection, {"token": self._contact["token"]} | me)
        return connection

    def _listen(self) -> None:
        failure = self._next()
        if failure is None or self._left.is_set():
            return
        self._failure = failure
        self._told.set()
        if not self._left.wait(_GRACE_SECONDS):
            frame = sys._current_frames().get(self._main)
            _end_process(failure.error(self._rank, _work(_frames_of(frame))))

    def _next(self) -> Failure | None:
        """Return the failure that the relay reports, or None when the run ends well.

        A relay that goes silent means that rank 0 died.
        """
        with suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                return None if "done" in message else Failure(**message)
        return Failure(0, self._contact["host"], self._contact["pid"], "")


def _may_be_a_peers(error: BaseException) -> bool:
    """Tell whether another rank's end may have caused the error; torch raises RuntimeError then."""
    return isinstance(error, RuntimeError | OSError)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, BurnishError) else f"{type(error).__name__}: {error}"


def _work(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Name the innermost frame outside torch and our own machinery."""
    place = "no code of its own"
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if not any(module == name or module.startswith(name + ".") for name in _MACHINERY):
            place = f"{module}.{frame.f_code.co_qualname} (line {line})"
    return place


def _frames_of(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_stack(frame))[::-1] if frame is not None else []


def _end_process(error: BurnishError) -> None:
    """End the process at once; the main thread cannot be reached."""
    text = f"\nburnish: {error}\n  this rank did not stop by itself; the stacks of its threads:\n"
    with suppress(OSError):  # standard error may be closed
        os.write(2, text.encode())
        faulthandler.dump_traceback(2)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first rank that failed: its machine, its process, and the text of its error ("" if killed)."""

    rank: int
    host: str
    pid: int
    reason: str

    def error(self, rank: int, work: str) -> BurnishError:
        """Return the error that `rank` raises, which was in `work` meanwhile."""
        who = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        meanwhile = f"while rank {rank} was in {work}"
        if self.reason:
            error = BurnishError(
                f"{who} failed {meanwhile}",
                have=self.reason,
                do=f"see the traceback of rank {self.rank}",
            )
            error.told_elsewhere = True
            return error
        return BurnishError(
            f"{who} died {meanwhile}",
            have="its connection closed without a word",
            do=f"look on {self.host} for what ended it: a signal, the out-of-memory killer, a crash",
        )


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to a rank; `rank` is -1 until it introduces itself."""

    connection: socket.socket
    unread: bytes = b""
    rank: int = -1
    host: str = ""
    pid: int = 0
    said_goodbye: bool = False


class Relay(threading.Thread):
    """Hear of every rank's end and tell the others, until rank 0 leaves. Runs in rank 0."""

    @classmethod
    def start_for(cls, layout: Layout, store: Store) -> Self:
        """Open a port, start the thread, and put address and token into the store as `watch`."""
        relay = cls(local=layout.local_world == layout.world)
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        store.set("watch", json.dumps(relay.contact | me))
        relay.start()
        return relay

    def __init__(self, local: bool) -> None:
        super().__init__(name="burnish-relay", daemon=True)
        self._open = ExitStack()
        self._listener = self._open.enter_context(_listen_on("localhost" if local else ""))
        close_when_forked(self._listener)
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._token = secrets.token_hex(16)
        self._failure: Failure | None = None
        self._peers: list[_Peer] = []
        address, port = self._listener.getsockname()[:2]
        self.contact = {"address": address if local else "", "port": port, "token": self._token}

    def run(self) -> None:
        """Serve until rank 0's connection ends."""
        with self._open:
            self._selector.register(self._listener, selectors.EVENT_READ)
            serving = True
            while serving:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._accept()
                    elif not self._hear(key.data):
                        serving &= key.data.rank != 0
            self._tell_all({"done": True})
            for peer in self._peers:
                peer.connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the caller hung up
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            close_when_forked(connection)
            peer = _Peer(connection)
            self._peers.append(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> bool:
        """Read a peer's messages; return False when its connection has ended."""
        received = b""
        with suppress(OSError):  # reset, or closed by keep-alive
            received = peer.connection.recv(1 << 16)
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        listening = all(self._understand(peer, line) for line in lines)
        if received and listening and len(peer.unread) < _LONGEST_LINE:
            return True
        if peer.rank >= 0 and not peer.said_goodbye:
            self._fail(peer, "")
        self._peers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        return False

    def _understand(self, peer: _Peer, line: bytes) -> bool:
        """Act on one message; return False from a stranger."""
        try:
            message = json.loads(line)
            if peer.rank < 0:
                return self._greet(peer, message)
            reason = message["reason"]
        except (ValueError, KeyError, TypeError):
            return False
        peer.said_goodbye = True
        if reason is not None:
            self._fail(peer, str(reason) or "no text")
        return True

    def _greet(self, peer: _Peer, message: dict[str, Any]) -> bool:
        if not secrets.compare_digest(str(message["token"]), self._token):
            return False
        peer.rank, peer.host, peer.pid = message["rank"], message["host"], message["pid"]
        if self._failure is not None:
            self._tell(peer, asdict(self._failure))
        return True

    def _fail(self, peer: _Peer, reason: str) -> None:
        """Tell all ranks of the first failure; later ones follow from it."""
        if self._failure is None:
            self._failure = Failure(peer.rank, peer.host, peer.pid, reason)
            self._tell_all(asdict(self._failure))

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if peer.rank >= 0:
                self._tell(peer, message)

    def _tell(self, peer: _Peer, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the peer is ending too, and is noticed in turn
            send_line(peer.connection, message)


def _listen_on(host: str) -> socket.socket:
    """Listen on a free port of `host`; "" means all addresses, IPv4 and IPv6 alike."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    if not host:
        return socket.create_server(("", 0))
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), 0), family=family)


def send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON object as a line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def keep_alive(connection: socket.socket) -> None:
    """Let the system probe a silent machine, and close the connection when it does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def close_when_forked(connection: socket.socket) -> None:
    """Keep forked workers from holding the connection open after this process has died."""
    held = weakref.ref(connection)

    def close() -> None:
        inherited = held()
        if inherited is not None and inherited.fileno() >= 0:
            os.close(inherited.detach())

    os.register_at_fork(after_in_child=close)
