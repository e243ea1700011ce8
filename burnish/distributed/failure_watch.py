"""When one rank fails or dies, all the others stop within seconds and say which one it was.

A collective whose peer is gone fails with a text about sockets (gloo) or hangs (NCCL). So every
rank holds one TCP connection to a relay thread in rank 0 (`burnish.distributed.relay`). A rank that
raises says so before it leaves; the connection of one that is killed is closed by its system, that
of a lost machine by TCP keep-alive. There are no heartbeats, so a rank that is merely busy, stopped
in a debugger or asleep with its laptop is never taken for dead.

Left out: going on without the lost rank. The launcher restarts the run, and the run resumes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.distributed.distributed_c10d import Store

from burnish.distributed.layout import Layout
from burnish.distributed.relay import Failure, Relay, close_when_forked, keep_alive, send_line
from burnish.errors import BurnishError, StoppedError

_GRACE_SECONDS = 5.0
# How long a rank may go on after hearing of a failure; then its process is ended.
_VERDICT_SECONDS = 2.0
# How long a rank with a broken collective waits to hear whose fault it was.
_CONNECT_SECONDS = 60.0
_MACHINERY = ("torch", "contextlib", "threading", "burnish.distributed", "burnish.boxes")
# Modules whose frames do not tell what a rank was doing.


@contextmanager
def watching(layout: Layout, host: str, store: Store) -> Iterator[Watch | None]:
    """Be connected to the relay during the block; a lone process has nobody to watch.

    `host` is the machine of rank 0; `store` is shared by all ranks. A rank that does not leave the
    block within five seconds of a failure, its own or another's, has its process ended, with the
    failure and the stacks of its threads on standard error: a kernel that waits for a lost rank
    cannot be interrupted.
    """
    if layout.world == 1:
        yield None
        return
    watch = Watch(layout, host, store)
    try:
        yield watch
    finally:
        watch.leave()


@contextmanager
def naming_failures(watch: Watch | None, rank: int) -> Iterator[None]:
    """Tell the others if the block raises on this rank, and hear it if it does on theirs.

    Another rank's failure is raised as `BurnishError` in place of the error that a broken
    collective gives.
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


class Watch:
    """This rank's end of the connection to the relay."""

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
        """The first failure of the run if it is another rank's, waiting this long for the news of it."""
        self._told.wait(wait_seconds)
        first = self._failure
        return None if first is None or first.rank == self._rank else first

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, unless it is an orderly stop that they come to by themselves."""
        if not isinstance(error, StoppedError):
            self._reported = True
            self._send({"reason": _reason(error)})

    def leave(self) -> None:
        """Close the connection, with a goodbye unless a failure has been reported."""
        self._left.set()
        if not self._reported:
            self._send({"reason": None})
        with suppress(OSError):  # closed by the relay already
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._relay is not None:
            self._relay.join(_GRACE_SECONDS)
        self._listener.join(_GRACE_SECONDS)
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # rank 0 is gone, and has told everybody before or is missed by all
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
        """The failure the relay tells of; None when the run ends well. Its own end is rank 0's."""
        with suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                return None if "done" in message else Failure(**message)
        return Failure(0, self._contact["host"], self._contact["pid"], "")


def _may_be_a_peers(error: BaseException) -> bool:
    """Whether it may come of another rank's end: torch raises such errors as RuntimeError."""
    return isinstance(error, RuntimeError | OSError)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, BurnishError) else f"{type(error).__name__}: {error}"


def _work(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost place in the code, outermost frame first, that tells what a rank was doing."""
    place = "no code of its own"
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if not any(module == name or module.startswith(name + ".") for name in _MACHINERY):
            place = f"{module}.{frame.f_code.co_qualname} (line {line})"
    return place


def _frames_of(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_stack(frame))[::-1] if frame is not None else []


def _end_process(error: BurnishError) -> None:
    """Leave at once: the main thread is out of reach."""
    text = f"\nburnish: {error}\n  this rank did not stop by itself; the stacks of its threads:\n"
    with suppress(OSError):  # standard error may be closed; the process has to end all the same
        os.write(2, text.encode())
        faulthandler.dump_traceback(2)
    os._exit(1)
