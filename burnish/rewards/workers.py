"""Calls with a deadline, in processes that can be killed.

A thread that hangs cannot be stopped. So functions that may hang run in worker processes, and one that misses its deadline is
killed with all it started, and replaced. Workers are plain interpreters that stay: `multiprocessing` would import the main script
and torch again, or fork a process with a GPU and threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from burnish.errors import BurnishError, UsageError
from burnish.rewards.asked import Bundle, Call, Calls
from burnish.rewards.call import Answer
from burnish.rewards.load import Signature
from burnish.rewards.worker import Asked, Pace, Said

START_SECONDS = 120.0
"""How long a worker may take to import the reward functions' modules."""
BORNE_TIMEOUTS = 8
"""How many calls of one function may miss their deadline in a row, beside one per worker, before it is taken to hang."""
_LATE_SECONDS = 5.0
# How long a worker may be silent about the calls of an async function beyond their deadline, before its event loop is taken to be blocked.
_CLOSE_SECONDS = 1.0
_CHECK_SECONDS = 1.0
# How long a wait for answers goes on before the next look at whether it is still wanted.

Check = Callable[[], None]
"""Called at least each second while answers are waited for. What it raises ends the wait."""


class Workers:
    """Up to `limit` processes that each know the same functions."""

    signatures: Sequence[Signature]
    """How each function wants to be called."""

    def __init__(
        self, functions: Sequence[tuple[str, Mapping[str, Any]]], limit: int, pace: Pace
    ) -> None:
        """Start one worker and wait until it has loaded `functions` (name and further arguments of each).

        `pace` has the deadline of every call. Raises `UsageError` for a function that cannot be loaded.
        """
        self._functions = functions
        self._limit = limit
        self._pace = pace
        self._workers = [_Worker(functions, pace)]
        try:
            (worker,) = self._workers
            if not wait([worker.connection], START_SECONDS):
                raise self._not_started(f"still importing after {START_SECONDS:g} s")
            self.signatures = self._welcome(worker)
        except BaseException:
            self.close()
            raise

    def run(self, asked: Sequence[Call], check: Check) -> list[list[Answer]]:
        """Return the answers to the calls, in their order.

        What `check` raises is raised here, after busy workers are killed. A call that misses its deadline, or whose worker dies, is
        answered with an error. A function that misses it `BORNE_TIMEOUTS` times more than there are workers, in a row, is not called again:
        its other calls get an error at once. So a function that always hangs costs `timeout` · (1 + BORNE_TIMEOUTS / workers) seconds.
        One worker makes an async function's calls, `concurrency` at one time, each with its own deadline. A call that blocks the event
        loop is killed with those beside it, and another worker makes the rest.
        """
        calls = Calls(asked, self.signatures)
        try:
            while not calls.answered:
                check()
                self._hand_out(calls)
                for worker in self._heard_from():
                    self._take_answers(worker, calls)
                for worker in self._overdue():
                    if not worker.ready:
                        raise self._not_started(f"still importing after {START_SECONDS:g} s")
                    self._give_up(worker, calls, None)
                self._stop_hanging(calls)
        except BaseException:
            # Whoever interrupts this must not find late answers here at the next call.
            for worker in [w for w in self._workers if not w.idle]:
                self._discard(worker)
            raise
        return calls.answers

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end(_CLOSE_SECONDS)
        self._workers = []

    def _stop_hanging(self, calls: Calls) -> None:
        """End what is under way, and what waits, of functions that hang."""
        hanging = calls.hanging(1 + Fraction(BORNE_TIMEOUTS, self._limit))
        for worker in [w for w in self._workers if w.tickets and w.function in hanging]:
            calls.put_back(worker.function, worker.tickets)
            self._discard(worker)
        calls.refuse(
            hanging, f"given up: call after call had no answer within {self._pace.timeout:g} s"
        )

    def _hand_out(self, calls: Calls) -> None:
        for worker in [w for w in self._workers if w.idle]:
            if calls.waiting:
                worker.ask(calls.waiting.popleft(), calls, self._patience)
        starting = sum(not worker.ready for worker in self._workers)
        room = self._limit - len(self._workers)
        for _ in range(min(room, len(calls.waiting) - starting)):
            self._workers.append(_Worker(self._functions, self._pace))

    def _patience(self, function: int) -> float:
        """How long a worker that is at this function may be silent."""
        return self._pace.timeout + _LATE_SECONDS * self.signatures[function].is_async

    def _heard_from(self) -> list[_Worker]:
        """Wait for the first answer or deadline, but not for longer than until the next check."""
        busy = {worker.connection: worker for worker in self._workers if not worker.idle}
        soonest = min(worker.deadline for worker in busy.values())
        left = max(0.0, soonest - time.monotonic())
        heard = wait(list(busy), min(left, _CHECK_SECONDS))
        return [worker for connection, worker in busy.items() if connection in heard]

    def _take_answers(self, worker: _Worker, calls: Calls) -> None:
        """All that has come of one that was heard from."""
        if not worker.ready:
            self._welcome(worker)
            return
        try:
            while worker.tickets and worker.connection.poll():
                ticket, said = worker.connection.recv()
                self._note(worker, ticket, said, calls)
        except (EOFError, OSError):
            status = worker.end(_CLOSE_SECONDS)
            self._give_up(worker, calls, f"its process ended ({_status(status)})")

    def _note(self, worker: _Worker, ticket: int, said: Said, calls: Calls) -> None:
        worker.deadline = time.monotonic() + self._patience(worker.function)
        if said == "begun":
            worker.begun.add(ticket)
            return
        worker.begun.discard(ticket)
        worker.tickets.remove(ticket)
        if said == "late":
            calls.fail([ticket], self._late)
            calls.miss(worker.function, Fraction(1, self._pace.concurrency))
        else:
            calls.answer(ticket, said)

    def _overdue(self) -> Iterable[_Worker]:
        now = time.monotonic()
        return [worker for worker in self._workers if not worker.idle and worker.deadline <= now]

    def _give_up(self, worker: _Worker, calls: Calls, died: str | None) -> None:
        """Fail the calls of a worker that `died` or is late; another worker makes those it had not begun."""
        self._discard(worker)
        failed = worker.begun or worker.tickets
        calls.fail(failed, died or self._late)
        calls.put_back(worker.function, worker.tickets - failed)
        if died is None:
            is_async = self.signatures[worker.function].is_async
            calls.miss(worker.function, Fraction(1, 1 if is_async else self._limit))

    @property
    def _late(self) -> str:
        return f"no answer within {self._pace.timeout:g} s"

    def _discard(self, worker: _Worker) -> None:
        worker.end(0)
        worker.connection.close()
        self._workers.remove(worker)

    def _welcome(self, worker: _Worker) -> Sequence[Signature]:
        """The first message of a worker."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError) as error:
            status = worker.end(_CLOSE_SECONDS)
            raise self._not_started(f"ended while importing ({_status(status)})") from error
        if isinstance(message, BurnishError):
            raise message
        worker.ready = True
        signatures: Sequence[Signature] = message
        return signatures

    def _not_started(self, have: str) -> UsageError:
        return UsageError(
            "A process for reward functions did not start.",
            have=have,
            want=f"to import {', '.join(name for name, _ in self._functions)}",
            do="see what it wrote to the terminal, and what those modules do when imported",
        )


class _Worker:
    """One process, seen from the one that started it."""

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], pace: Pace) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        self.ready = False
        """Whether it has loaded the functions."""
        self.function = -1
        """The index of the function that it is at, or was."""
        self.tickets: set[int] = set()
        """The indices of the calls it is at."""
        self.begun: set[int] = set()
        """Those of an async function that have begun."""
        self.deadline = time.monotonic() + START_SECONDS
        """When it has to have answered."""
        with theirs:
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            command = [sys.executable, "-m", "burnish.rewards.worker"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                # A session of its own: the terminal's ctrl-C is for us, and the whole group can be killed.
                start_new_session=True,
            )
        with suppress(OSError):  # dead already: the first receive says so
            self.connection.send((list(functions), pace))

    @property
    def idle(self) -> bool:
        """Whether it waits for a call."""
        return self.ready and not self.tickets

    def ask(self, bundle: Bundle, calls: Calls, patience: Callable[[int], float]) -> None:
        """Send it calls of one function; `patience` says how long that may go without a word."""
        self.function = calls.asked[bundle[0]].function
        self.tickets, self.begun = set(bundle), set()
        self.deadline = time.monotonic() + patience(self.function)
        asked: list[Asked] = [(i, calls.asked[i].arguments, calls.asked[i].count) for i in bundle]
        with suppress(OSError):  # died while idle: the receive says so
            self.connection.send((self.function, asked))

    def end(self, patience: float) -> int:
        """Its exit status, once it has ended by itself within `patience` seconds or been killed."""
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()


def _status(returncode: int) -> str:
    if returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"
