"""For tests of the supervisor: a launcher that forks its ranks, which die or find no room as a test says."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.ranks.ports import free_port
from support.runs.training_files import At, Command


class ForkedAttempt:
    def __init__(self, ranks: Sequence[Command]) -> None:
        self.ranks, self._ended = ranks, {}

    def poll(self, seconds: float) -> Mapping[int, int]:
        until, before = time.monotonic() + min(seconds, 0.2), len(self._ended)
        while len(self._ended) == before and time.monotonic() < until:
            for rank, command in enumerate(self.ranks):
                if rank not in self._ended and not command.is_running():
                    self._ended[rank] = command.wait()
            time.sleep(0.01)
        return self._ended

    def last_lines(self, rank: int) -> Sequence[str]:
        return self.ranks[rank].output.splitlines()[-20:]

    def send(self, number: int) -> None:
        for rank, command in enumerate(self.ranks):
            if rank not in self._ended:
                command.send(number)

    def close(self) -> None:
        self.send(signal.SIGKILL)
        for rank, command in enumerate(self.ranks):
            if rank not in self._ended:
                self._ended[rank] = command.wait()


@dataclass
class ForkedLauncher:
    work: Path
    argv: Sequence[str]
    kills: Mapping[int, tuple[int, At]] = field(default_factory=dict)
    """By attempt: which rank sends itself a signal, and when."""
    places: Callable[[], int] = lambda: 1 << 10
    """How many processes there is room for in all."""
    started: list[ForkedAttempt] = field(default_factory=list)

    def room(self) -> int:
        last = self.started[-1] if self.started else None
        return self.places() - (len(last.ranks) if last and not last._ended else 0)

    def start(
        self, world: int, attempt: int, seconds: float, stopped: Callable[[], bool]
    ) -> ForkedAttempt | None:
        if world > self.places():
            return None
        victim, at = self.kills.get(attempt, (0, None))
        shared = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        ranks = [
            Command(
                self.work,
                self.argv,
                shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                at if rank == victim else None,
            )
            for rank in range(world)
        ]
        self.started.append(ForkedAttempt(ranks))
        return self.started[-1]

    @property
    def output(self) -> str:
        return "\n".join(each.output for attempt in self.started for each in attempt.ranks)
