"""Run environments in worker processes, and start a process again that hangs or dies.

A conversation belongs to one worker, by its key. A fresh worker repeats what the lost one's conversations have done, and compares the
answers. So only the conversation whose call hung is lost.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Self

from burnish.config.environment import EnvironmentConfig
from burnish.distributed.environment import environ_of_child, kill_descendants
from burnish.environments.base import Action, EndedConversation
from burnish.environments.calls import (
    AgentReply,
    Answered,
    Asked,
    Begin,
    Call,
    Close,
    Described,
    Key,
    Score,
    ScoreGroup,
    Step,
)
from burnish.errors import BurnishError, UsageError
from burnish.records import Prompt

_START_SECONDS = 120.0
"""How long a worker may take to import the class's module and to make its rows."""
_CHECK_SECONDS = 1.0
_MOST_BYTES = 64 << 20
"""Longest answer of a worker, which keeps its messages below that."""

log = logging.getLogger("burnish")

Check = Callable[[], None]
"""Called at least each second during a wait for answers. An exception that it raises ends the wait."""


class EnvironmentPool:
    """Conversations in up to `rollout.environment.workers` processes."""

    def __init__(self, config: EnvironmentConfig, *, asks_rows: bool = False) -> None:
        """Import the class in a worker. Raises `UsageError` for one that is no environment."""
        self._config = config
        self._workers: dict[int, _Worker] = {}
        self._history: dict[Key, list[tuple[Asked, Answered]]] = {}
        """What each conversation has done, to repeat it in a fresh process."""
        try:
            worker = _Worker(config, "rows" if asks_rows else "tools")
            self._workers[0] = worker
        except BaseException:
            self.close()
            raise
        self.described: Described = worker.described
        if self.described.tools and (config.max_calls == 0 or config.max_turns == 1):
            self.close()
            raise UsageError(
                "the model could never read what a tool answers",
                have=f"{len(self.described.tools)} tools, and rollout.environment.max_turns={config.max_turns}, max_calls={config.max_calls}",
                want="at least 2 turns and 1 call",
                do="raise the limit, or use a class without tools",
            )

    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        """Return a row as environments get it: with the messages of its prompt. NeMo Gym gets its rows as they are."""
        if self._config.has_gym_agents:
            return prompt.columns
        return {**prompt.columns, "prompt": prompt.messages}

    def require_begin(self, prompt: Prompt, name: str) -> None:
        """Begin one conversation, and close it. Raises `UsageError` if that fails."""
        key = (0, 0)
        answer = self.begin({key: (self.row_of(prompt), 0)})[key]
        self.end([key])
        if answer.observation is None:
            raise UsageError(
                f"the environment cannot begin a conversation with {name}",
                have=answer.error,
                want="messages, or nothing",
                do=f"correct `begin` or the constructor of {self._config.target}, or the row",
            )

    def begin(
        self, tasks: Mapping[Key, tuple[Mapping[str, Any], int]], check: Check = lambda: None
    ) -> dict[Key, Answered]:
        """Make an environment of each row and seed; return their answers."""
        return self._run([Begin(key, row, seed) for key, (row, seed) in tasks.items()], check)

    def step(
        self,
        actions: Mapping[Key, Action] | Mapping[Key, tuple[AgentReply, ...]],
        check: Check = lambda: None,
    ) -> dict[Key, Answered]:
        """Tell environments what the model said; return their answers."""
        return self._run([Step(key, action) for key, action in actions.items()], check)

    def score(self, keys: Sequence[Key], check: Check = lambda: None) -> dict[Key, Answered]:
        """Return the rewards of conversations that have ended; nothing if the class has none to give."""
        return self._run([Score(key) for key in keys] if self.described.scores else [], check)

    def score_groups(
        self, groups: Mapping[Key, Sequence[EndedConversation]], check: Check = lambda: None
    ) -> dict[Key, Answered]:
        """Let the class compare the ended conversations of each group; return its answers."""
        return self._run([ScoreGroup(key, ended) for key, ended in groups.items()], check)

    def end(self, keys: Sequence[Key]) -> None:
        """Close environments."""
        by_place = defaultdict[int, list[Key]](list)
        for key in keys:
            self._history.pop(key, None)
            by_place[self._place(key)].append(key)
        for place, own in by_place.items():
            if place in self._workers:
                self._workers[place].close(own)

    def close(self) -> None:
        """End all workers, and what they started."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()
        self._history.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, key: Key) -> int:
        prompt_key, sample = key
        return (prompt_key + sample) % self._config.workers

    def _worker(self, place: int) -> _Worker:
        if place not in self._workers:
            self._workers[place] = _Worker(self._config)
        return self._workers[place]

    def _run(self, calls: Sequence[Asked], check: Check) -> dict[Key, Answered]:
        self.ask(calls)
        answers = dict[Key, Answered]()
        while self.is_asked:
            answers |= self.answers(check)
        return answers

    def ask(self, calls: Sequence[Asked]) -> None:
        """Begin calls; `answers` returns what comes of them."""
        by_place = defaultdict[int, list[Asked]](list)
        for call in calls:
            by_place[self._place(call.key)].append(call)
        for place, own in by_place.items():
            self._worker(place).ask(own)

    @property
    def is_asked(self) -> bool:
        """Whether calls have no answer yet."""
        return any(worker.is_asked for worker in self._workers.values())

    def answers(self, check: Check, seconds: float = _CHECK_SECONDS) -> dict[Key, Answered]:
        """Return the answers that come within some seconds, perhaps none."""
        answers = dict[Key, Answered]()
        try:
            check()
            working = {w.connection: place for place, w in self._workers.items() if w.is_asked}
            ready = wait(working, seconds)
            for connection, place in working.items():
                self._receive(place, answers, is_there=connection in ready)
        except BaseException:
            self.close()  # nobody must find late answers
            raise
        return answers

    def _receive(self, place: int, answers: dict[Key, Answered], *, is_there: bool) -> None:
        """Take in a worker's answer, if it is there. If the worker is lost, fail its call and make the others in a fresh process."""
        worker = self._workers[place]
        try:
            received = worker.receive(is_there=is_there)
        except (EOFError, OSError, TimeoutError) as error:
            guilty, *others = worker.pending.values()
            # Those that were to be closed are gone with the process.
            rest = [call for call in others if not isinstance(call, Close)]
            why = self._discard(place, error)
            what = "did not close" if isinstance(guilty, Close) else "is lost"
            log.warning("an environment %s: %s; a fresh process goes on with the others", what, why)
            if isinstance(guilty, Close):
                self._go_on(place, rest, answers)
                return
            if rest and self._config.has_agents and not isinstance(error, TimeoutError):
                self._one_by_one(place, (guilty, *rest), answers)
                return
            answers[guilty.key] = Answered(guilty.key, None, why, self._config.timeout_seconds)
            self._history.pop(guilty.key, None)
            self._go_on(place, rest, answers)
            return
        if received is not None:
            call, answer = received
            if isinstance(call, Close):
                return
            answers[call.key] = answer
            if answer.observation is not None and not isinstance(call, ScoreGroup):
                self._history.setdefault(call.key, []).append((call, answer))

    def _go_on(self, place: int, calls: Sequence[Asked], answers: dict[Key, Answered]) -> None:
        """Make calls again in a fresh process, after what their conversations have done."""
        failures = self._repeat(place)
        answers |= {key: Answered(key, None, failures[key], 0.0) for key in failures}
        self._worker(place).ask([call for call in calls if call.key not in failures])

    def _one_by_one(self, place: int, calls: Sequence[Asked], answers: dict[Key, Answered]) -> None:
        """Make calls again that ran at the same time, each alone. That shows which of them ends the process."""
        for call in calls:
            failures = {} if place in self._workers else self._repeat(place)
            answers |= {key: Answered(key, None, failures[key], 0.0) for key in failures}
            if call.key in failures:
                continue
            answer = self._answer_of(place, call)
            answers[call.key] = answer
            if answer.observation is None:
                self._history.pop(call.key, None)
            elif not isinstance(call, ScoreGroup):
                self._history.setdefault(call.key, []).append((call, answer))

    def _discard(self, place: int, error: Exception) -> str:
        """End a lost worker, and return what happened to it."""
        worker = self._workers.pop(place)
        why = f"no answer within {self._config.timeout_seconds:g} s"
        if not isinstance(error, TimeoutError):
            why = f"its process {worker.end_text()}"
        worker.end()
        return why

    def _repeat(self, place: int) -> dict[Key, str]:
        """Repeat in a fresh process what a lost one's conversations have done; return why some cannot go on."""
        failures = dict[Key, str]()
        for key in [key for key in self._history if self._place(key) == place]:
            for call, before in self._history[key]:
                again = self._answer_of(place, call)
                if again.observation != before.observation:
                    failures[key] = again.error or "it answers otherwise when it is repeated"
                    break
        for key in failures:
            self._history.pop(key)
        if failures and place not in self._workers:
            # The process was lost again, and with it what was repeated before.
            failures |= self._repeat(place)
        return failures

    def _answer_of(self, place: int, call: Asked) -> Answered:
        worker = self._worker(place)
        worker.ask([call])
        while True:
            try:
                is_there = bool(wait([worker.connection], _CHECK_SECONDS))
                received = worker.receive(is_there=is_there)
            except (EOFError, OSError, TimeoutError) as error:
                return Answered(
                    call.key, None, f"when repeated: {self._discard(place, error)}", 0.0
                )
            if received is not None and not isinstance(received[0], Close):
                return received[1]


def _limit_waits(connection: Connection[Any, Any]) -> None:
    """Let reading the rest of a message, and writing one, end with an error after a while."""
    limit = struct.pack("ll", int(_START_SECONDS), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


class _Worker:
    def __init__(self, config: EnvironmentConfig, asked: Literal["", "tools", "rows"] = "") -> None:
        """Start a process, and wait until it has imported the class and told what is asked. Raises `UsageError` if it cannot."""
        self._config = config
        self.pending: dict[Key, Call] = {}
        """Its calls without an answer, in order."""
        self._closings = 0
        self.began = time.monotonic()
        self.connection: Connection[Any, Any]
        self.connection, worker_end = Pipe()
        _limit_waits(self.connection)
        with worker_end:
            command = [sys.executable, "-m", "burnish.environments.worker"]
            self._process = subprocess.Popen(
                [*command, str(worker_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=environ_of_child(),
                pass_fds=[worker_end.fileno()],
                # A session of its own: its group can be killed, and it does not get the terminal's ctrl-C.
                start_new_session=True,
            )
        self.send((config.target, config.arguments, asked, sys.argv, sys.path))
        described = None
        is_late = not self.connection.poll(_START_SECONDS)
        if not is_late:
            with suppress(EOFError, OSError):
                described = self.connection.recv()
        if isinstance(described, BurnishError):
            self.end()
            raise described
        if described is None:
            have = f"still importing after {_START_SECONDS:g} s" if is_late else self.end_text()
            self.end()
            raise UsageError(
                "the process of rollout.environment did not start",
                have=have,
                want=f"to import {config.target}",
                do="see what it wrote to the terminal, and what that module does when imported",
            )
        self.described: Described = described

    @property
    def is_asked(self) -> bool:
        """Whether something that was asked has no answer. Nobody waits for closing alone."""
        return any(not isinstance(call, Close) for call in self.pending.values())

    def close(self, keys: Sequence[Key]) -> None:
        """Close environments. The deadline is for all of them, and the next calls wait."""
        self._closings += 1
        self.ask([Close((-1, self._closings), keys)])

    def ask(self, calls: Sequence[Call]) -> None:
        """Send calls. Each has the time limit from the answer before it."""
        if calls:
            if not self.pending:
                self.began = time.monotonic()
            self.pending |= {call.key: call for call in calls}
            self.send(calls)

    def send(self, message: Any) -> None:
        with suppress(OSError):  # `receive` finds that the process has ended
            self.connection.send(message)

    def receive(self, *, is_there: bool) -> tuple[Call, Answered] | None:
        """Return a call and its answer if it is there, or None. Raises `TimeoutError`, or `EOFError` or `OSError` if the process died."""
        if is_there:
            answer = self._read()
            self.began = time.monotonic()
            return self.pending.pop(answer.key), answer
        if self._process.poll() is not None and not self.connection.poll():
            raise EOFError
        if time.monotonic() - self.began > self._config.timeout_seconds:
            raise TimeoutError
        return None

    def _read(self) -> Answered:
        """Read an answer. Raises `OSError` if something else was written to the connection, as a tool that closes all descriptors may."""
        try:
            answer: Answered = pickle.loads(self.connection.recv_bytes(_MOST_BYTES))  # noqa: S301 - of our own worker
            self.pending[answer.key]
        except (EOFError, OSError):
            raise
        except Exception as error:
            raise OSError(errno.EPROTO, "no answer of a worker") from error
        return answer

    def end(self) -> None:
        """Kill the process and all that it started, in any session."""
        self.connection.close()
        kill_descendants(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end_text(self) -> str:
        """Say how the process ended."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_CHECK_SECONDS)
            how = f"signal {signal.strsignal(-code)}" if code < 0 else f"exit status {code}"
            return f"ended ({how})"
        return "closed its connection, or wrote something else to it"
