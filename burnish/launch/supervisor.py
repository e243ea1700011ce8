"""Keep a run going: start its processes, and restart them from the newest commit when one dies.

Only a `Launcher` knows where processes run.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from burnish.config.schema import DistributedConfig
from burnish.distributed.environment import AFTER_SAVE, STOPPING, handling
from burnish.errors import BurnishError, MissingError, UsageError, count_text

_LOOK_SECONDS = 0.5
# Seconds that ranks may go on after one has failed. Connected ranks hear of it within seconds, others do not.
_GRACE_SECONDS = 20.0
# Seconds to wait for room for a smaller number of processes.
_SMALLER_SECONDS = 30.0
REFUSALS = range(UsageError.exit_code, MissingError.exit_code + 1)
"""Exit codes of errors that a restart cannot mend: settings, data or checkpoints that cannot be used."""

log = logging.getLogger("burnish")


class Attempt(Protocol):
    """The processes of one start of a run."""

    def poll(self, seconds: float) -> Mapping[int, int]:
        """Return each ended rank's exit status, in order of ending. Wait at most `seconds` for one.

        A rank that signal N killed has status -N.
        """

    def last_lines(self, rank: int) -> Sequence[str]:
        """Return a rank's last lines that were not shown yet."""

    def send(self, number: int) -> None:
        """Send every rank a signal."""

    def close(self) -> None:
        """Kill ranks that still run, and wait for them."""


class Launcher(Protocol):
    """Starts the processes of a run. The defaults are for one machine, whose lost devices stay lost."""

    def processes(self) -> int:
        """Return the default number of processes. Raises `UsageError` if that is not known."""
        return 1

    def room(self) -> int:
        """Return how many more processes have room now."""
        return 0

    def start(
        self, world: int, attempt: int, seconds: float, stopped: Callable[[], bool]
    ) -> Attempt | None:
        """Start `world` processes; return None if they find no room within `seconds` or before `stopped`."""

    def close(self) -> None:
        """End processes beside the ranks, such as servers."""


class Supervisor:
    """Runs one command to its end, over several starts."""

    def __init__(
        self,
        launcher: Launcher,
        settings: DistributedConfig,
        world: int,
        is_possible: Callable[[int], bool] = lambda world: True,
    ) -> None:
        """`world` is the wanted number of processes; `is_possible` tells which others have a layout."""
        self._launcher = launcher
        self._settings = settings
        self._wanted = self._world = world
        self._is_possible = is_possible
        self._signals: list[int] = []
        self._passed_on = 0

    def run(self) -> int:
        """Return the run's exit code. Raises `BurnishError` if it failed too often or finds no room."""
        restarts = 0
        with handling(STOPPING, lambda number, _: self._signals.append(number)):
            for attempt in range(1 << 30):
                started = self._placed(attempt)
                if started is None:
                    return 128 + self._signals[0]
                larger, rank, status = self.follow(started)
                code = _exit_code(status)
                if not status or self._signals or code in REFUSALS:
                    return code
                if larger:
                    log.info("going on with %s", count_text(larger, "process"))
                    self._world = larger
                if code == 128 + AFTER_SAVE:
                    continue
                if restarts == self._settings.max_restarts:
                    raise BurnishError(
                        f"the run failed {count_text(restarts + 1, 'time')}, the last time because rank {rank} {_described(status)}",
                        want=f"at most distributed.max_restarts: {restarts} failures",
                        do="see the lines above; the same command continues from the newest checkpoint",
                    )
                restarts += 1
                log.warning(
                    "rank %d %s; starting the run again from its newest checkpoint, %d of %d times",
                    rank,
                    _described(status),
                    restarts,
                    self._settings.max_restarts,
                )
        raise AssertionError

    def _placed(self, attempt: int) -> Attempt | None:
        """Start as many processes as before, or fewer without room for these; None after a signal."""
        settings = self._settings
        for world, seconds in self._worlds():
            started = self._launcher.start(world, attempt, seconds, lambda: bool(self._signals))
            if started is not None and world < self._world:
                log.warning("going on with %d of %d processes", world, self._wanted)
                self._world = world
            if started is not None or self._signals:
                return started
        least = settings.min_processes or self._wanted
        raise BurnishError(
            "there is no room for the run's processes",
            have=f"room for {self._launcher.room()}",
            want=f"{self._world} within distributed.replace_seconds: {settings.replace_seconds:g}, or {least} afterwards",
            do="start the same command again when there is; distributed.min_processes lets a run go on with fewer",
        )

    def _worlds(self) -> Iterator[tuple[int, float]]:
        """Yield numbers of processes to try, and the seconds for each."""
        yield self._world, self._settings.replace_seconds
        if (least := self._settings.min_processes) is not None:
            room = min(self._launcher.room(), self._world - 1)
            yield from ((world, _SMALLER_SECONDS) for world in self._sizes(room, least))

    def _sizes(self, most: int, least: int) -> Iterator[int]:
        """Yield sizes that have a layout, the largest first."""
        return filter(self._is_possible, range(most, least - 1, -1))

    def follow(self, started: Attempt) -> tuple[int, int, int]:
        """Wait for the end. Return a larger number with room, or 0, then the first failed rank and its status."""
        with closing(started):
            larger, ended = self._watched(started)
            rank, status = next((each for each in ended.items() if each[1]), (0, 0))
            is_known = status in REFUSALS and ended.get(0) == status  # rank 0 printed this error
            for line in () if is_known or not status else started.last_lines(rank):
                log.error("rank %d: %s", rank, line)
        return larger, rank, status

    def _watched(self, started: Attempt) -> tuple[int, Mapping[int, int]]:
        asked = False
        larger = 0
        deadline = float("inf")
        while True:
            while self._passed_on < len(self._signals):
                started.send(self._signals[self._passed_on])
                self._passed_on += 1
            ended = started.poll(_LOOK_SECONDS)
            if len(ended) == self._world or time.monotonic() > deadline:
                return larger, ended
            failed = next(filter(None, ended.values()), 0)
            if failed and deadline == float("inf"):
                # A rank that a signal stopped has saved, and other ranks may still be writing.
                is_stopped = failed > 128
                patience = self._settings.timeout_seconds if is_stopped else _GRACE_SECONDS
                deadline = time.monotonic() + patience
            if not (ended or self._signals):
                larger = self._larger()
            if larger and not asked:
                log.info("there is room for %d processes again, after the next save", larger)
                started.send(AFTER_SAVE)
                asked = True

    def _larger(self) -> int:
        """Return a larger number of processes with room, or 0."""
        if self._world == self._wanted:
            return 0
        room = min(self._wanted, self._world + self._launcher.room())
        return next(self._sizes(room, self._world + 1), 0)


def run_once(launcher: Launcher, world: int | None) -> int:
    """Start a command once; return its exit code. Raises `UsageError` if its processes find no room."""
    world = launcher.processes() if world is None else world
    started = launcher.start(world, 0, _SMALLER_SECONDS, lambda: False)
    if started is None:
        raise UsageError(
            "there is no room for the processes",
            have=f"room for {launcher.room()}",
            want=world,
            do="give --processes a smaller number, or wait",
        )
    settings = DistributedConfig(timeout_seconds=_GRACE_SECONDS)
    _, rank, status = Supervisor(launcher, settings, world).follow(started)
    if status < 0:
        log.error("rank %d %s", rank, _described(status))
    return _exit_code(status)


def _exit_code(status: int) -> int:
    return status if status >= 0 else 128 - status


def _described(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"
