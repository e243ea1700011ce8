"""Run slow work in a process beside a training process. It ends when its pipe closes or the training process dies.

A thread would compete for the GIL, and its crash would kill the run.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from burnish.distributed.environment import STOPPING, die_with, environ_of_child
from burnish.errors import BurnishError

# Seconds to wait for a killed process to end. The kernel first lets it finish its disk I/O.
_KILL_SECONDS = 10.0
# Lines of the process's log that an error shows.
_LAST_LINES = 20

_log = logging.getLogger(__name__)


class Companion:
    """The process, and this end of its pipe.

    It runs `module.serve(pipe, parent, *descriptors)`: `pipe` is a descriptor, `parent` this process's id. It inherits `keep_open`.
    With a `log` it has no terminal.
    """

    def __init__(
        self,
        module: str,
        what: str,
        descriptors: tuple[int, ...] = (),
        keep_open: tuple[int, ...] = (),
        log: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._what = what
        self._log = log
        own_end, child_end = socket.socketpair()
        with child_end:
            arguments = (child_end.fileno(), os.getpid(), *descriptors)
            # The process starts with the run's signals blocked; `accompany` unblocks them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"from {module} import serve; serve{arguments}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environ_of_child(), **(environ or {})},
                    pass_fds=(child_end.fileno(), *descriptors, *keep_open),
                    start_new_session=log is not None,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._pipe = Connection(own_end.detach())

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def send(self, message: object) -> bool:
        """Send a message; return False if the pipe is closed."""
        try:
            self._pipe.send(message)
        except OSError:
            return False
        return True

    def answer(self, seconds: float) -> Any:
        """Return the next message within `seconds`, else None; a `BurnishError` for death or an unreadable message."""
        try:
            return self._pipe.recv() if self._pipe.poll(seconds) else None
        except (EOFError, OSError):
            return self.died()
        except Exception as error:  # noqa: BLE001 - unpickling may raise anything
            return BurnishError(
                f"{self._what} sent a message that cannot be read",
                have=f"{type(error).__name__}: {error}",
                want="a pickled answer",
                do="look into the log for what it was doing",
            )

    def moved(self) -> str | None:
        """Return the kernel's I/O counters of the process; None if unknown."""
        with suppress(OSError):
            return Path(f"/proc/{self._process.pid}/io").read_text()
        return None

    def died(self) -> BurnishError:
        """Return an error that shows how the process ended."""
        status = self._status()
        lines = ""
        if self._log is not None:
            self._log.seek(0)
            lines = "".join(["\n", *self._log.readlines()[-_LAST_LINES:]])
        return BurnishError(
            f"{self._what} died",
            have=f"exit status {status}{lines}",
            want="a process that lives as long as the run",
            do="look for what ended it: a signal, the out-of-memory killer, a crash",
        )

    def kill(self) -> None:
        """Kill the process."""
        self._pipe.close()
        self._process.kill()
        if self._status() is None:
            _log.warning("%s hangs in the system: pid %d", self._what, self._process.pid)

    def _status(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_KILL_SECONDS)
        return None


def as_burnish_error(error: Exception, what: str, do: str) -> BurnishError:
    """Return an error that the training process can raise."""
    if isinstance(error, BurnishError):
        return error
    have = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return BurnishError(what, have=have, do=do)


def accompany(parent: int) -> None:
    """Leave signals to the parent, and die with it."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    die_with(parent)
