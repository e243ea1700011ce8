"""Calls with a deadline, in processes that can be killed.

A thread that hangs cannot be stopped and holds its pool forever, so functions that are not known to
end run in worker processes; one that misses its deadline is killed with all it started, and another takes
its place. They are started once and then wait, so a call costs a message, not a process. They are
plain interpreters (`burnish.rewards.worker`) and not children of `multiprocessing`, whose spawn imports
the main script again, torch and all, and whose fork copies a process that may hold a GPU and threads.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from burnish.errors import BurnishError, UsageError
from burnish.rewards.call import Answer
from burnish.rewards.load import Signature
from burnish.rewards.worker import Asked

START_SECONDS = 120.0
"""How long a worker may take to import the reward functions' modules."""
BORNE_TIMEOUTS = 8
"""How many calls of one function may miss their deadline in a row, beside one per worker, before it is taken to hang."""
_CLOSE_SECONDS = 1.0
_CHECK_SECONDS = 1.0
# How long a wait for answers goes on before the next look at whether it is still wanted.

Check = Callable[[], None]
"""Called at least each second while answers are waited for. What it raises ends the wait."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one function."""

    function: int
    """Its index among the workers' functions."""
    arguments: Mapping[str, Any]
    """Its keyword arguments."""
    count: int
    """How many rollouts it is about."""


Bundle = Sequence[int]
"""Calls of one function that a worker gets together, by their indices."""


class Workers:
    """Up to `limit` processes that each know the same functions."""

    signatures: Sequence[Signature]
    """How each function wants to be called."""

    def __init__(
        self, functions: Sequence[tuple[str, Mapping[str, Any]]], limit: int, timeout: float
    ) -> None:
        """Start one worker and wait until it has loaded `functions` (name and further arguments of each).

        `timeout` is the deadline of each call in seconds. Raises `UsageError` for a function that
        cannot be loaded.
        """
        self._functions = functions
        self._limit = limit
        self._timeout = timeout
        self._workers = [_Worker(functions)]
        try:
            (worker,) = self._workers
            if not wait([worker.connection], START_SECONDS):
                raise self._not_started(f"still importing after {START_SECONDS:g} s")
            self.signatures = self._welcome(worker)
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Call], check: Check) -> list[list[Answer]]:
        """The answers to `calls`, in their order, whatever the order they were made in.

        What `check` raises is raised here, once the workers that are at a call are killed.

        A call that misses its deadline, or whose worker dies, is answered with that as the error.
        A function of which `BORNE_TIMEOUTS` more calls than there are workers miss it in a row, without
        an answer in between, is not called again in this run: its other calls get an error at
        once. So a function that always hangs costs `timeout` · (1 + BORNE_TIMEOUTS / workers) seconds, rounded
        up to whole time-outs. Calls are made in a random order, so that those a function
        hangs on, such as all samples of one prompt, do not come in a row.

        The calls of an async function begin all at once, in one worker, and so have the same deadline. Those that
        have not ended by then miss it; the others have been answered.
        """
        answers: dict[int, list[Answer]] = {}
        waiting = self._bundles(calls)
        missed: Counter[int] = Counter()
        try:
            while len(answers) < len(calls):
                check()
                self._hand_out(calls, waiting)
                for worker in self._heard_from():
                    heard = self._take_answers(worker, calls)
                    for i in heard:
                        del missed[calls[i].function]
                    answers |= heard
                for worker in self._overdue():
                    if not worker.ready:
                        raise self._not_started(f"still importing after {START_SECONDS:g} s")
                    late = self._give_up(worker, calls, f"no answer within {self._timeout:g} s")
                    missed.update(calls[i].function for i in late)
                    answers |= late
                answers |= self._given_up(calls, waiting, missed)
        except BaseException:
            # Whoever interrupts this must not find late answers here at the next call.
            for worker in [w for w in self._workers if not w.idle]:
                self._discard(worker)
            raise
        return [answers[i] for i in range(len(calls))]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end(_CLOSE_SECONDS)
        self._workers = []

    def _bundles(self, calls: Sequence[Call]) -> deque[Bundle]:
        """What is handed to a worker at a time: all calls of an async function, or one of another."""
        together: defaultdict[int, list[int]] = defaultdict(list)
        alone: list[Bundle] = []
        for i, call in enumerate(calls):
            if self.signatures[call.function].is_async:
                together[call.function].append(i)
            else:
                alone.append([i])
        return deque([*together.values(), *random.Random(0).sample(alone, len(alone))])

    def _given_up(
        self, calls: Sequence[Call], waiting: deque[Bundle], missed: Counter[int]
    ) -> dict[int, list[Answer]]:
        """Takes the calls of functions that hang out of `waiting`; their answers."""
        hanging = {f for f, n in missed.items() if n >= self._limit + BORNE_TIMEOUTS}
        given_up = [bundle for bundle in waiting if calls[bundle[0]].function in hanging]
        for bundle in given_up:
            waiting.remove(bundle)
        text = "not called: {} calls in a row had no answer within {:g} s"
        return {
            i: [Answer(None, text.format(missed[calls[i].function], self._timeout))]
            * calls[i].count
            for bundle in given_up
            for i in bundle
        }

    def _hand_out(self, calls: Sequence[Call], waiting: deque[Bundle]) -> None:
        for worker in [w for w in self._workers if w.idle]:
            if waiting:
                worker.ask(waiting.popleft(), calls, time.monotonic() + self._timeout)
        starting = sum(not worker.ready for worker in self._workers)
        room = self._limit - len(self._workers)
        for _ in range(min(room, len(waiting) - starting)):
            self._workers.append(_Worker(self._functions))

    def _heard_from(self) -> list[_Worker]:
        """Wait for the first answer or deadline, but not for longer than until the next check."""
        busy = {worker.connection: worker for worker in self._workers if not worker.idle}
        soonest = min(worker.deadline for worker in busy.values())
        left = max(0.0, soonest - time.monotonic())
        heard = wait(list(busy), min(left, _CHECK_SECONDS))
        return [worker for connection, worker in busy.items() if connection in heard]

    def _take_answers(self, worker: _Worker, calls: Sequence[Call]) -> dict[int, list[Answer]]:
        """All that has come of one that was heard from."""
        if not worker.ready:
            self._welcome(worker)
            return {}
        answers: dict[int, list[Answer]] = {}
        try:
            while worker.tickets and worker.connection.poll():
                ticket, said = worker.connection.recv()
                worker.tickets.remove(ticket)
                answers[ticket] = said
        except (EOFError, OSError):
            status = worker.end(_CLOSE_SECONDS)
            answers |= self._give_up(worker, calls, f"its process ended ({_status(status)})")
        return answers

    def _overdue(self) -> Iterable[_Worker]:
        now = time.monotonic()
        return [worker for worker in self._workers if not worker.idle and worker.deadline <= now]

    def _give_up(
        self, worker: _Worker, calls: Sequence[Call], error: str
    ) -> dict[int, list[Answer]]:
        self._discard(worker)
        return {i: [Answer(None, error)] * calls[i].count for i in worker.tickets}

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

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        self.ready = False
        """Whether it has loaded the functions."""
        self.tickets: set[int] = set()
        """The indices of the calls it is at."""
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
            self.connection.send(list(functions))

    @property
    def idle(self) -> bool:
        """Whether it waits for a call."""
        return self.ready and not self.tickets

    def ask(self, bundle: Bundle, calls: Sequence[Call], deadline: float) -> None:
        """Send it calls of one function, by their indices."""
        self.tickets, self.deadline = set(bundle), deadline
        asked: list[Asked] = [(i, calls[i].arguments, calls[i].count) for i in bundle]
        with suppress(OSError):  # died while idle: the receive says so
            self.connection.send((calls[bundle[0]].function, asked))

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
