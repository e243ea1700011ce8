"""A process beside a training process that does its slow work: the training process's end of it.

A process and not a thread: what it computes would take the interpreter from training, and what
kills it must not kill a run. It is sent messages and answers them, through a pipe; it ends when
the pipe is closed, and at once when the training process dies. Left out: what it does
(`burnish.checkpoint.background`, `burnish.checkpoint.destinations.uploader`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from burnish.errors import BurnishError

_KILL_SECONDS = 10.0
# How long one that was killed may take to go: the system lets it finish what it has begun on a disk.
_CODE = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve{arguments!r}"
_PR_SET_PDEATHSIG = 1
_LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGTERM)
"""What ends a run; whoever sends it to all of its processes wants them to do what the run says."""

_log = logging.getLogger(__name__)


class Companion:
    """The process, and this end of its pipe.

    It runs `module.serve(pipe, parent, *descriptors)` with numbers: its end of the pipe, the id of
    this process, and those of our `descriptors` that it is for. `keep_open` are further ones that
    it holds as long as it lives. `what` names it in messages: "the process that ...".
    """

    def __init__(
        self,
        module: str,
        what: str,
        descriptors: tuple[int, ...] = (),
        keep_open: tuple[int, ...] = (),
    ) -> None:
        self._what = what
        ours, theirs = socket.socketpair()
        with theirs:
            code = _CODE.format(
                path=[os.path.abspath(each) for each in sys.path],
                module=module,
                arguments=(theirs.fileno(), os.getpid(), *descriptors),
            )
            with _held_back():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *descriptors, *keep_open),
                )
        self._pipe = Connection(ours.detach())

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, message: object) -> bool:
        """Whether it could be sent to."""
        try:
            self._pipe.send(message)
        except OSError:
            return False
        return True

    def answer(self, seconds: float) -> Any:
        """What it says next, waiting so long; None while it says nothing, a `BurnishError` when it died or cannot be understood."""
        try:
            return self._pipe.recv() if self._pipe.poll(seconds) else None
        except (EOFError, OSError):
            return self.died()
        except Exception as error:  # noqa: BLE001 - unpickling raises what it likes
            return BurnishError(
                f"{self._what} said what cannot be read",
                have=f"{type(error).__name__}: {error}",
                want="an answer of its own kind",
                do="look into the log for what it was doing",
            )

    def moved(self) -> str | None:
        """What the system counts of the bytes that it has read and written: it changes while it does; None where nobody counts."""
        with suppress(OSError):
            return Path(f"/proc/{self._process.pid}/io").read_text()
        return None

    def died(self) -> BurnishError:
        """What to say of one that has ended."""
        return BurnishError(
            f"{self._what} died",
            have=f"exit status {self._status()}",
            want="a process that lives as long as the run",
            do="look for what ended it: a signal, the out-of-memory killer, a crash",
        )

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self._pipe.close()
        self._process.kill()
        if self._status() is None:
            _log.warning("%s hangs in the system: pid %d", self._what, self._process.pid)

    def _status(self) -> int | None:
        """Its exit status, minus the number of the signal that killed it; None when it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_KILL_SECONDS)
        return None


@contextmanager
def _held_back() -> Iterator[None]:
    """A process that is started inside the block gets the run's signals only after `accompany`, which is after its imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RUN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accompany(parent: int) -> None:
    """Called by the process itself: leave signals to the parent, and die with it.

    Where the system cannot end it with its parent, the end of the pipe tells it to.
    """
    for number in _LEFT_TO_THE_RUN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RUN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
