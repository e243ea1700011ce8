"""Score rollouts: call every configured function, weight and add the values.

Functions that may hang run in worker processes. A late worker is killed with all processes that it started. Workers are plain
interpreters: `multiprocessing` would import the main script and torch again, or fork a process with a GPU and threads.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

import numpy as np

from burnish.config.schema import RewardConfig
from burnish.distributed.environment import environ_of_child
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.records import Completion, Prompt, RewardCall, Rollout
from burnish.rewards.builtin import exact_match, numeric
from burnish.rewards.overview import message_hint
from burnish.rewards.signature import (
    STACK_SIGNAL,
    Answer,
    Signature,
    arguments,
    call,
    read_signature,
    timed,
)

LOCAL: Mapping[str, Callable[..., float]] = {"exact_match": exact_match, "numeric": numeric}
"""Functions that run in this process, because they take linear time. Regular expressions and sympy can run for ever."""
START_SECONDS = 120.0
"""How long a worker may take to import the reward functions' modules."""
MAX_TIMEOUTS = 8
"""Lost calls in a row, plus one per worker, after which a function is given up; for async functions times `concurrency` / workers."""
# A worker that has not reported its late async calls so many seconds after their deadline counts as blocked.
_LATE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_CHECK_SECONDS = 1.0

Check = Callable[[], None]
"""A function that is called at least each second during a wait for answers. An exception that it raises ends the wait."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one function."""

    function: int
    """The function's index in `reward.functions`."""
    arguments: Mapping[str, Any]
    count: int
    """How many rollouts it is about."""


class RewardPool:
    """Score rollouts with configured functions."""

    def __init__(self, config: RewardConfig, moved: Callable[[], None] = lambda: None) -> None:
        """Load every function; `moved()` is called as calls end. Raises `UsageError` for an unusable function."""
        self._config = config
        self._workers: Workers | None = None
        if any(each.function not in LOCAL for each in config.functions):
            self._workers = Workers(config, moved)
            self._signatures = self._workers.signatures
        else:
            self._signatures = [
                read_signature(each.function, LOCAL[each.function], each.kwargs)
                for each in config.functions
            ]

    def check_columns(self, columns: Collection[str], setting: str) -> None:
        """Raise `MissingError` if `columns` lack a required one."""
        for each, signature in zip(self._config.functions, self._signatures, strict=True):
            for column in sorted(signature.columns - set(columns)):
                raise MissingError(
                    f"The reward function {each.function!r} needs a column that {setting} lacks.",
                    have=f"columns {sorted(columns)}",
                    want=column,
                    do="rename the parameter or the column, or give a value in the function's kwargs",
                )

    def require_answer(self, prompt: Prompt, name: str) -> None:
        """Score a ground truth as completion. Raises `UsageError` if a function fails."""
        text = prompt.answer if isinstance(prompt.answer, str) else ""
        no_ids, no_numbers = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        completion = Completion(no_ids, no_numbers, no_numbers, "stop", weights_version=0)
        (rollout,) = self.score([Rollout(prompt, 0, completion, text)])
        if rollout.reward_error is not None:
            raise UsageError(
                f"the reward fails for {name}",
                have=rollout.reward_error,
                want=f"a number for each completion, such as {text[:80]!r}",
                do=f"correct the function in reward.functions{message_hint(rollout)}",
            )

    def score(self, rollouts: Sequence[Rollout], check: Check = lambda: None) -> list[Rollout]:
        """Return the rollouts, in order, with `reward`, `reward_parts` and `reward_error`.

        A failure counts as `on_error`. A TRL function's None is left out; None from all is a failure. Further numbers of a verl
        function are parts, not added.
        """
        calls = self._calls(rollouts)
        remote = [each for each in calls if self._local(each.function) is None]
        results = iter(self._workers.run(remote, check) if self._workers and remote else [])
        answers: list[list[Answer]] = [[] for _ in self._signatures]
        for each in calls:
            local = self._local(each.function)
            answered = call(local, "verl", each.arguments, 1) if local else next(results)
            answers[each.function] += answered
        return [
            self._scored(rollout, [column[i] for column in answers])
            for i, rollout in enumerate(rollouts)
        ]

    def _local(self, function: int) -> Callable[..., float] | None:
        return LOCAL.get(self._config.functions[function].function)

    def _calls(self, rollouts: Sequence[Rollout]) -> list[Call]:
        calls = []
        for index, signature in enumerate(self._signatures):
            config = self._config.functions[index]
            most = 1 if signature.style == "verl" else config.per_call or max(len(rollouts), 1)
            for start in range(0, len(rollouts), most):
                members = rollouts[start : start + most]
                given = arguments(signature, config.kwargs, members)
                calls.append(Call(index, given, len(members)))
        return calls

    def _scored(self, rollout: Rollout, answers: Sequence[Answer]) -> Rollout:
        reward, parts, errors = 0.0, {}, []
        names = self._config.part_names
        for name, each, answer in zip(names, self._config.functions, answers, strict=False):
            value = answer.value
            if answer.error is not None:
                errors.append(f"{name}: {answer.error}")
                value = self._config.on_error
            if value is not None:
                parts[name] = value
                reward += each.weight * value
            parts |= {f"{name}/{extra}": x for extra, x in answer.extras.items()}
        if not parts and not self._config.models:
            errors.append("every reward function answered None")
            reward = self._config.on_error
        error = "; ".join(errors) or None
        calls = tuple(
            RewardCall(name, each.value, each.error, each.began, each.seconds)
            for name, each in zip(names, answers, strict=False)
        )
        return replace(rollout, reward=reward, reward_parts=parts, reward_error=error, calls=calls)

    def close(self) -> None:
        """End the workers."""
        if self._workers:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workers:
    """Up to `reward.workers` processes that each load all functions."""

    def __init__(self, config: RewardConfig, moved: Callable[[], None] = lambda: None) -> None:
        """Start one worker. Raises the error with which the worker fails to load functions."""
        self._config, self._moved = config, moved
        self._all: list[_Worker] = []
        self._idle = [self._started()]
        self.signatures = self._idle[0].signatures

    def run(self, calls: Sequence[Call], check: Check) -> list[list[Answer]]:
        """Return the answers to the calls, in order.

        A missed deadline or a worker's death is an error for the call. A function is given up as `MAX_TIMEOUTS` says. One worker makes an
        async function's calls, `concurrency` at a time. If one blocks the event loop, all running ones are killed. If `check` raises, all
        workers are killed.
        """
        todo = _Todo(calls, self.signatures, self._config, self._moved)
        count = min(self._config.workers, len(todo.waiting))
        with futures.ThreadPoolExecutor(count) as threads:
            serving = {threads.submit(self._serve, todo) for _ in range(count)}
            try:
                while serving:
                    check()
                    ended, serving = futures.wait(serving, _CHECK_SECONDS, futures.FIRST_EXCEPTION)
                    for each in ended:
                        each.result()
            except BaseException:
                # After an interruption, the next `run` must not find late answers of this one.
                todo.given_up |= dict.fromkeys(range(len(self.signatures)), "the run stops")
                while serving:
                    for worker in list(self._all):
                        worker.end(0)
                    serving = futures.wait(serving, 0.1).not_done
                self.close()
                raise
        return [todo.answers[number] for number in range(len(calls))]

    def waits_for(self) -> str:
        """Return the function that runs longest, and its current line. For any thread."""
        asked = [(each.asked, each) for each in list(self._all) if each.asked is not None]
        if not asked:
            return ""
        (_, function), worker = min(asked, key=lambda each: each[0])
        return f"the reward {self._config.functions[function].function} ({worker.line()})"

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            worker.kill_programs()  # before the worker ends and orphans them
            worker.release()
        for worker in self._all:
            worker.end(_CLOSE_SECONDS)
        self._all, self._idle = [], []

    def _started(self) -> _Worker:
        worker = _Worker(self._config)
        self._all.append(worker)
        try:
            worker.load()
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.end(0)
        worker.release()
        self._all.remove(worker)

    def _serve(self, todo: _Todo) -> None:
        """Make calls in one worker, or another if it was killed, until none waits."""
        worker: _Worker | None = None
        with suppress(IndexError):
            worker = self._idle.pop()
        while bundle := todo.take():
            worker = worker or self._started()
            if not self._make(worker, bundle, todo):
                self._discard(worker)
                worker = None
        if worker:
            self._idle.append(worker)

    def _make(self, worker: _Worker, bundle: list[int], todo: _Todo) -> bool:
        """Make calls of one function; return whether the worker can go on."""
        function = todo.calls[bundle[0]].function
        at_once, patience = 1, self._config.timeout_seconds
        if self.signatures[function].is_async:
            at_once, patience = self._config.concurrency, patience + _LATE_SECONDS
        asked = [(i, todo.calls[i].arguments, todo.calls[i].count) for i in bundle]
        began = time.time()
        worker.asked = began, function
        try:
            worker.connection.send((function, asked))
            while bundle and function not in todo.given_up:
                number, answers = worker.receive(patience)
                bundle.remove(number)
                if answers is None:
                    todo.lose([number], todo.late, began)
                else:
                    todo.answer(number, answers)
            at_once = 0
        except TimeoutError:
            todo.lose(bundle[:at_once], todo.late, began)
        except (EOFError, OSError):
            todo.lose(bundle[:at_once], f"its process ended ({worker.status()})", began)
        worker.asked = None
        if bundle[at_once:]:
            todo.waiting.appendleft(bundle[at_once:])
        return not bundle


class _Todo:
    def __init__(
        self,
        calls: Sequence[Call],
        signatures: Sequence[Signature],
        config: RewardConfig,
        moved: Callable[[], None],
    ) -> None:
        self.calls, self._moved = calls, moved
        self.answers: dict[int, list[Answer]] = {}
        self.given_up: dict[int, str] = {}
        """Functions that were given up, by index, each with the error of its calls."""
        self.late = f"no answer within {config.timeout_seconds:g} s"
        share = 1 + MAX_TIMEOUTS / config.workers
        self._most_lost = [
            share * (config.concurrency if each.is_async else config.workers) for each in signatures
        ]
        self._lost: Counter[int] = Counter()
        self._lock = threading.Lock()
        bundles: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, each in enumerate(calls):
            together = signatures[each.function].is_async
            bundles[each.function, -1 if together else number].append(number)
        # Shuffled, so that hanging calls, such as all samples of one prompt, do not come in a row.
        rng = random.Random(0)
        mixed = [rng.sample(bundle, len(bundle)) for bundle in bundles.values()]
        rng.shuffle(mixed)
        self.waiting = deque(sorted(mixed, key=len, reverse=True))
        """Bundles of calls that a worker gets together: all calls of an async function, or one call of another."""

    def take(self) -> list[int] | None:
        with self._lock:
            while self.waiting:
                bundle = self.waiting.popleft()
                error = self.given_up.get(self.calls[bundle[0]].function)
                if error is None:
                    return bundle
                self._fail(bundle, f"given up: call after call: {error}")
        return None

    def answer(self, number: int, answers: list[Answer]) -> None:
        self.answers[number] = answers
        self._moved()
        del self._lost[self.calls[number].function]

    def _fail(self, numbers: Sequence[int], error: str, began: float | None = None) -> None:
        self._moved()
        for number in numbers:
            count = self.calls[number].count
            text = error if count == 1 else f"{error} for {count} completions"
            answers = [Answer(None, text)] * count
            self.answers[number] = answers if began is None else timed(answers, began)

    def lose(self, numbers: Sequence[int], error: str, began: float) -> None:
        """Fail calls; after too many in a row give their function up."""
        self._fail(numbers, error, began)
        function = self.calls[numbers[0]].function
        with self._lock:
            self._lost[function] += len(numbers)
            if self._lost[function] >= self._most_lost[function]:
                self.given_up[function] = error


class _Worker:
    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        self.signatures: Sequence[Signature] = ()
        self.asked: tuple[float, int] | None = None
        """When the worker got its current calls, and the function's index."""
        self._stack = TemporaryFile()  # noqa: SIM115 - closed by `release`
        with theirs:
            command = [sys.executable, "-m", "burnish.rewards.worker"]
            self._process = subprocess.Popen(
                [*command, *map(str, (theirs.fileno(), os.getpid(), self._stack.fileno()))],
                stdin=subprocess.DEVNULL,
                env=environ_of_child(),
                pass_fds=[theirs.fileno(), self._stack.fileno()],
                # With a session of its own, the worker does not get the terminal's ctrl-C, and its group can be killed.
                start_new_session=True,
            )

    def load(self) -> None:
        named = [(each.function, each.kwargs) for each in self._config.functions]
        limits = self._config.concurrency, self._config.timeout_seconds
        try:
            self.connection.send((named, *limits, sys.argv, sys.path))
            message = self.receive(START_SECONDS)
        except (EOFError, OSError) as error:
            late = isinstance(error, TimeoutError) and f"still importing after {START_SECONDS:g} s"
            raise UsageError(
                "A process for reward functions did not start.",
                have=late or f"ended while importing ({self.status()})",
                want=f"to import {', '.join(name for name, _ in named)}",
                do="see what it wrote to the terminal, and what those modules do when imported",
            ) from error
        if isinstance(message, BurnishError):
            raise message
        self.signatures = message

    def receive(self, patience: float) -> Any:
        """Return the next message. Raises `TimeoutError`, or `EOFError` or `OSError` if the worker died."""
        deadline = time.monotonic() + patience
        while not self.connection.poll(min(patience, _CHECK_SECONDS)):
            patience = deadline - time.monotonic()
            if patience <= 0:
                raise TimeoutError
            # A process that the worker started may hold its end of the connection open.
            if self._process.poll() is not None and not self.connection.poll():
                raise EOFError
        return self.connection.recv()

    def line(self) -> str:
        """Return a call's current line, such as `rewards.py line 12 in check`."""
        self._stack.seek(0)
        self._stack.truncate()
        self._process.send_signal(STACK_SIGNAL)
        text, deadline = "", time.monotonic() + _CLOSE_SECONDS
        while "/burnish/rewards/worker" not in text and time.monotonic() < deadline:
            time.sleep(0.01)
            text = os.pread(self._stack.fileno(), 1 << 16, 0).decode()
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
        ours = [number for number, frame in enumerate(frames) if "/burnish/rewards/" in frame[0]]
        if not ours or not ours[0] or "/asyncio/" in frames[ours[0] - 1][0]:
            return "no line is known"
        path, line, name = frames[ours[0] - 1]
        return f"{Path(path).name} line {line} in {name}"

    def release(self) -> None:
        self.connection.close()
        self._stack.close()

    def kill_programs(self) -> None:
        for pid in _descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, patience: float) -> int:
        """Kill the worker's programs and end it, by force after `patience` seconds."""
        self.kill_programs()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        with suppress(ProcessLookupError):  # another thread has killed it
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def status(self) -> str:
        returncode = self.end(_CLOSE_SECONDS)
        if returncode < 0:
            return f"signal {signal.Signals(-returncode).name}"
        return f"exit status {returncode}"


def _descendants(pid: int) -> list[int]:
    """Return a process's descendants, in any session."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found
