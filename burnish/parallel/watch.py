"""When one rank fails or dies, all the others stop within seconds and say which one it was.

A collective whose peer is gone fails with a text about sockets (gloo) or hangs (NCCL). So every
rank holds one TCP connection to a relay thread in rank 0 (`burnish.parallel.relay`). A rank that
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

from torch.distributed.distributed_c10d import Store

from burnish.errors import BurnishError, StoppedError
from burnish.parallel.layout import Layout
from burnish.parallel.relay import Failure, Relay, close_when_forked, keep_alive, send_line

_GRACE_SECONDS = 5.0
# How long a rank may go on after hearing of a failure; then its process is ended.
_VERDICT_SECONDS = 2.0
# How long a rank with a broken collective waits to hear whose fault it was.
_CONNECT_SECONDS = 60.0
_MACHINERY = ("torch", "contextlib", "threading", "burnish.parallel", "burnish.launch")
# Modules whose frames do not tell what a rank was doing.


@contextmanager
def watching(layout: Layout, host: str, store: Store) -> Iterator[None]:
    """Tell the others if the block raises here, and hear it if it does there.

    `host` is the machine of rank 0; `store` is shared by all ranks. A failure elsewhere is raised
    as `BurnishError` in place of the error that a broken collective gives. A rank that neither
    leaves the block nor meets a collective within five seconds has its process ended, with the same
    message and the stacks of its threads on standard error: a kernel that waits for a lost rank
    cannot be interrupted.
    """
    if layout.world == 1:
        yield
        return
    watch = Watch(layout, host, store)
    try:
        yield
    except BaseException as error:
        failure = watch.failure(_VERDICT_SECONDS if _may_be_a_peers(error) else 0.0)
        watch.leave(_reason(error))
        if failure is not None and not isinstance(error, BurnishError):
            frames = traceback.walk_tb(error.__traceback__)
            raise failure.error(layout.rank, _work(frames)) from error
        raise
    else:
        watch.leave(None)


class Watch:
    """This rank's end of the connection to the relay."""

    def __init__(self, layout: Layout, host: str, store: Store) -> None:
        self._rank = layout.rank
        self._failure: Failure | None = None
        self._told = threading.Event()
        self._left = threading.Event()
        self._main = threading.get_ident()
        self._relay = Relay.start_for(layout, store) if layout.rank == 0 else None
        self._contact = json.loads(store.get("watch"))
        self._socket = self._connect(host)
        self._listener = threading.Thread(target=self._listen, name="burnish-watch", daemon=True)
        self._listener.start()

    def failure(self, wait_seconds: float) -> Failure | None:
        """The first failure of another rank, waiting this long for the news of it."""
        self._told.wait(wait_seconds)
        return self._failure

    def leave(self, reason: str | None) -> None:
        """Say goodbye: with the text of this rank's error, or None when all is well."""
        self._left.set()
        with suppress(OSError):  # the relay may be gone already, and then nobody is left to tell
            send_line(self._socket, {"reason": reason})
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._relay is not None:
            self._relay.join(_GRACE_SECONDS)
        self._listener.join(_GRACE_SECONDS)
        self._socket.close()

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


def _reason(error: BaseException) -> str | None:
    """What the others are told; None for an orderly stop, which they come to by themselves."""
    if isinstance(error, StoppedError):
        return None
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
