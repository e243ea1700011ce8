"""The thread in rank 0 that hears of every rank's end and tells the others.

One JSON object a line. A rank says who it is (with a token from the store, so that strangers are
not heard) and, when it leaves, `{"reason": null}` or its error's text. The relay sends every rank
the first `Failure`, or `{"done": true}` when rank 0 leaves. Left out: what ranks do about it
(`burnish.distributed.failure_watch`).
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch.distributed.distributed_c10d import Store

from burnish.distributed.layout import Layout
from burnish.distributed.ports import reserve_port
from burnish.errors import BurnishError

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Seconds of silence before the other machine is asked, seconds between questions, questions.
_SEND_SECONDS = 1.0
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Failure:
    """The first rank of a run to go."""

    rank: int
    """Which one."""
    host: str
    """Its machine."""
    pid: int
    """Its process there."""
    reason: str
    """The text of its error; "" when it ended without a word."""

    def error(self, rank: int, work: str) -> BurnishError:
        """The same as `rank` raises it, which was busy with `work`."""
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
    """A connection, and the rank at its other end once that has said who it is."""

    connection: socket.socket
    unread: bytes = b""
    rank: int = -1
    host: str = ""
    pid: int = 0
    said_goodbye: bool = False


class Relay(threading.Thread):
    """Serves from `start_for` until rank 0 leaves."""

    @classmethod
    def start_for(cls, layout: Layout, store: Store) -> Self:
        """Open a port, start the thread, and leave address and token in the store as `watch`."""
        relay = cls(local=layout.local_world == layout.world)
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        store.set("watch", json.dumps(relay.contact | me))
        relay.start()
        return relay

    def __init__(self, local: bool) -> None:
        super().__init__(name="burnish-relay", daemon=True)
        self._open = ExitStack()
        port = self._open.enter_context(reserve_port("localhost" if local else ""))
        self._listener = port.socket
        close_when_forked(port.socket)
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._token = secrets.token_hex(16)
        self._failure: Failure | None = None
        self._peers: list[_Peer] = []
        address = port.host if local else ""
        self.contact = {"address": address, "port": port.port, "token": self._token}

    def run(self) -> None:
        """Serve until rank 0's own connection ends."""
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
        with suppress(OSError):  # whoever knocked has gone again
            connection, _ = self._listener.accept()
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            close_when_forked(connection)
            peer = _Peer(connection)
            self._peers.append(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> bool:
        """Take in what a peer sent; False when its connection has ended."""
        received = b""
        with suppress(OSError):  # reset by the system or given up by keep-alive: closed as well
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
        """Act on one line; False from a stranger."""
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
        """Note and tell the first failure; what fails after it fails because of it."""
        if self._failure is None:
            self._failure = Failure(peer.rank, peer.host, peer.pid, reason)
            self._tell_all(asdict(self._failure))

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if peer.rank >= 0:
                self._tell(peer, message)

    def _tell(self, peer: _Peer, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it is going as well, and its own end is noticed in turn
            send_line(peer.connection, message)


def send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON object as a line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def keep_alive(connection: socket.socket) -> None:
    """Have the system ask a silent machine whether it is still there, and close when it is not."""
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
