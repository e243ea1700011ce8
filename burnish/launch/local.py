"""Start the ranks of a run as processes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from burnish.distributed.environment import PARENT
from burnish.launch.supervisor import Launcher

LAST_LINES = 20
"""How many of a failed rank's last lines are shown."""
_PAUSE_SECONDS = 0.05


def free_port(host: str = "") -> int:
    """Return a free port of this machine."""
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])


class RankProcess:
    """A `burnish` command in a child process, which dies with the thread that starts it."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], *, cwd: str, keeps: int | None
    ) -> None:
        """Start it. Keep its last `keeps` lines; None: it inherits this process's output."""
        shown = keeps is None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "burnish", *argv],
            env={**environ, PARENT: str(os.getpid())},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's ctrl-C is for this process, which passes it on
        )
        self._lines: deque[str] = deque(maxlen=keeps)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return its exit status, or minus the number of the signal that killed it; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._reader.join(_PAUSE_SECONDS)  # a process that the child started may hold the pipe
        return status

    def take_lines(self) -> list[str]:
        """Return and forget the kept lines."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def send(self, number: int) -> None:
        """Send it a signal, if it runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        if self._process.stdout is not None:
            with suppress(OSError, ValueError), self._process.stdout as lines:
                self._lines.extend(line.rstrip("\n") for line in lines)


class _LocalAttempt:
    """An `Attempt` on this machine. Rank 0 inherits this process's output."""

    def __init__(self, argv: Sequence[str], world: int, attempt: int) -> None:
        shared = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        self._ended: dict[int, int] = {}
        self._ranks: list[RankProcess] = []
        for rank in range(world):
            environ = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            keeps = LAST_LINES if rank else None
            self._ranks.append(RankProcess(argv, environ, cwd=os.getcwd(), keeps=keeps))

    def poll(self, seconds: float) -> Mapping[int, int]:
        until = time.monotonic() + seconds
        before = len(self._ended)
        while True:
            for rank, process in enumerate(self._ranks):
                if rank not in self._ended and (status := process.poll()) is not None:
                    self._ended[rank] = status
            if len(self._ended) > before or time.monotonic() > until:
                return self._ended
            time.sleep(_PAUSE_SECONDS)

    def last_lines(self, rank: int) -> Sequence[str]:
        return self._ranks[rank].take_lines()

    def send(self, number: int) -> None:
        for process in self._ranks:
            process.send(number)

    def close(self) -> None:
        for process in self._ranks:
            process.send(signal.SIGKILL)
        for process in self._ranks:
            process.close()


class LocalLauncher(Launcher):
    """A `Launcher` on this machine."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    def start(
        self, world: int, attempt: int, seconds: float, stopped: Callable[[], bool]
    ) -> _LocalAttempt:
        """Start the ranks at once."""
        return _LocalAttempt(self._argv, world, attempt)

    def close(self) -> None:
        """Do nothing."""
