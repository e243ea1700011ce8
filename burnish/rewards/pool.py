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
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, Self

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
_START_SECONDS = 120.0
"""How long a worker may take to import the reward functions' modules."""
_MAX_TIMEOUTS = 8
"""Lost calls in a row, plus one per worker, after which a function is given up; for async functions times `concurrency` / workers."""
# A worker that has not reported its late async calls so many seconds after their deadline counts as blocked.
_LATE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_CHECK_SECONDS = 1.0

Check = Callable[[], None]
"""A function that is called at least each second during a wait for answers. An exception that it raises ends the wait."""


class _Call(NamedTuple):
    function: int
    """The function's index in `reward.functions`."""
    arguments: Mapping[str, Any]
    size: int
    """How many rollouts it is about."""


class RewardPool:
    """Score rollouts with configured functions, in up to `reward.workers` processes that each load all of them."""

    def __init__(self, config: RewardConfig, moved: Callable[[], None] = lambda: None) -> None:
        """Load every function; `moved()` is called as calls end. Raises `UsageError` for an unusable function."""
        self._config, self._moved = config, moved
        self._workers: list[_Worker] = []
        self._signatures: Sequence[Signature] = ()
        if all(each.function in LOCAL for each in config.functions):
            self._signatures = [
                read_signature(each.function, LOCAL[each.function], each.kwargs)
                for each in config.functions
            ]
            return
        try:
            self._workers.append(_Worker(config))
            while not self._workers[0].signatures:
                _Round([], self._workers, config, moved).listen()
        except BaseException:
            self._end(0)
            raise
        self._signatures = self._workers[0].signatures

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
        results = iter(self._run(remote, check) if remote else [])
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

    def _calls(self, rollouts: Sequence[Rollout]) -> list[_Call]:
        calls = []
        for index, signature in enumerate(self._signatures):
            config = self._config.functions[index]
            most = 1 if signature.style == "verl" else config.per_call or max(len(rollouts), 1)
            for start in range(0, len(rollouts), most):
                members = rollouts[start : start + most]
                given = arguments(signature, config.kwargs, members)
                calls.append(_Call(index, given, len(members)))
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

    def _run(self, calls: Sequence[_Call], check: Check) -> list[list[Answer]]:
        """Return the workers' answers to the calls, in order; if `check` raises, kill all workers."""
        under_way = _Round(calls, self._workers, self._config, self._moved, self._signatures)
        try:
            while len(under_way.answers) < len(calls):
                under_way.hand_out()
                check()
                under_way.listen()
        except BaseException:
            self._end(0)  # the next round must not find late answers of this one
            raise
        return [under_way.answers[number] for number in range(len(calls))]

    def waits_for(self) -> str:
        """Return the function that runs longest, and its current line. For any thread."""
        busy = [each for each in list(self._workers) if each.left]
        if not busy:
            return ""
        worker = min(busy, key=lambda each: each.began)
        return f"the reward {self._config.functions[worker.function].function} ({worker.line()})"

    def close(self) -> None:
        """End all workers."""
        self._end(_CLOSE_SECONDS)

    def _end(self, patience: float) -> None:
        for worker in self._workers:
            worker.kill_programs()  # before the worker ends and orphans them
            worker.release()
        for worker in self._workers:
            worker.end(patience)
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Round:
    """Calls that workers are to make.

    A missed deadline or a worker's death is an error for the call. A function is given up as `_MAX_TIMEOUTS` says. One worker makes an
    async function's calls, `concurrency` at a time. If one blocks the event loop, all running ones are killed.
    """

    def __init__(
        self,
        calls: Sequence[_Call],
        workers: list[_Worker],
        config: RewardConfig,
        moved: Callable[[], None],
        signatures: Sequence[Signature] = (),
    ) -> None:
        self._calls, self._workers, self._config, self._moved = calls, workers, config, moved
        self.answers: dict[int, list[Answer]] = {}
        self._late = f"no answer within {config.timeout_seconds:g} s"
        share = 1 + _MAX_TIMEOUTS / config.workers
        self._most_lost = [
            share * (config.concurrency if each.is_async else config.workers) for each in signatures
        ]
        self._lost: Counter[int] = Counter()
        bundles: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, each in enumerate(calls):
            together = signatures[each.function].is_async
            bundles[each.function, -1 if together else number].append(number)
        # Shuffled, so that hanging calls, such as all samples of one prompt, do not come in a row.
        rng = random.Random(0)
        mixed = [rng.sample(bundle, len(bundle)) for bundle in bundles.values()]
        rng.shuffle(mixed)
        self._waiting = deque(sorted(mixed, key=len, reverse=True))
        """Bundles of calls that a worker gets together: all calls of an async function, or one call of another."""

    def hand_out(self) -> None:
        """Give waiting calls to idle workers, and start workers for the others."""
        idle = [each for each in self._workers if each.is_idle]
        while idle and self._waiting:
            idle.pop().ask(self._waiting.popleft(), self._calls)
        loading = sum(not each.signatures for each in self._workers)
        missing = min(len(self._waiting) - loading, self._config.workers - len(self._workers))
        self._workers += [_Worker(self._config) for _ in range(missing)]

    def listen(self) -> None:
        """Wait at most a second for messages of workers, and take them in."""
        working = {each.connection: each for each in self._workers if not each.is_idle}
        patience = min(each.deadline for each in working.values()) - time.monotonic()
        ready = wait(working, min(max(patience, 0.0), _CHECK_SECONDS))
        for connection, worker in working.items():
            try:
                message = worker.receive(is_there=connection in ready)
            except (EOFError, OSError) as error:
                late = isinstance(error, TimeoutError)
                if not worker.signatures:
                    raise worker.refusal(late) from error
                why = self._late if late else f"its process ended ({worker.status()})"
                self._lose(worker, worker.left[: worker.at_once], why, ended=True)
                continue
            if isinstance(message, BurnishError):
                raise message
            if message is None:
                continue
            if not worker.signatures:
                worker.signatures = message
                continue
            number, answers = message
            if answers is None:
                self._lose(worker, [number], self._late, ended=False)
            else:
                worker.left.remove(number)
                self.answers[number] = answers
                self._moved()
                del self._lost[worker.function]

    def _lose(self, worker: _Worker, numbers: list[int], error: str, *, ended: bool) -> None:
        """Fail calls of a worker. After too many in a row, give their function up."""
        self._fail(numbers, error, worker.began)
        self._lost[worker.function] += len(numbers)
        is_given_up = self._lost[worker.function] >= self._most_lost[worker.function]
        worker.left = [number for number in worker.left if number not in numbers]
        if ended or (is_given_up and worker.left):
            self._workers.remove(worker)
            worker.end(0)
            worker.release()
            self._waiting.extendleft([worker.left] if worker.left else [])
        if is_given_up:
            bundles, self._waiting = self._waiting, deque[list[int]]()
            for bundle in bundles:
                if self._calls[bundle[0]].function == worker.function:
                    self._fail(bundle, f"given up: call after call: {error}")
                else:
                    self._waiting.append(bundle)

    def _fail(self, numbers: Sequence[int], error: str, began: float | None = None) -> None:
        self._moved()
        for number in numbers:
            count = self._calls[number].size
            text = error if count == 1 else f"{error} for {count} completions"
            answers = [Answer(None, text)] * count
            self.answers[number] = answers if began is None else timed(answers, began)


class _Worker:
    signatures: Sequence[Signature] = ()
    """Of all functions; empty while it loads them."""

    def __init__(self, config: RewardConfig) -> None:
        """Start a process that loads the functions."""
        self._config = config
        self.function, self.began, self.at_once = 0, 0.0, 1
        """The function of its current calls, when it got them, and how many of them run at a time."""
        self.left: list[int] = []
        """Numbers of its current calls that it has not answered."""
        self._patience = _START_SECONDS
        self.deadline = time.monotonic() + _START_SECONDS
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
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
        named = [(each.function, each.kwargs) for each in config.functions]
        self._send((named, config.concurrency, config.timeout_seconds, sys.argv, sys.path))

    @property
    def is_idle(self) -> bool:
        return bool(self.signatures) and not self.left

    def ask(self, bundle: list[int], calls: Sequence[_Call]) -> None:
        """Send calls of one function."""
        self.function, self.began = calls[bundle[0]].function, time.time()
        is_async = self.signatures[self.function].is_async
        self.at_once = self._config.concurrency if is_async else 1
        self._patience = self._config.timeout_seconds + (_LATE_SECONDS if is_async else 0)
        self.deadline, self.left = time.monotonic() + self._patience, bundle
        self._send((self.function, [(i, calls[i].arguments, calls[i].size) for i in bundle]))

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # `receive` finds that the process has ended
            self.connection.send(message)

    def receive(self, *, is_there: bool) -> Any:
        """Return the message that is there, or None. Raises `TimeoutError`, or `EOFError` or `OSError` if the worker died."""
        if is_there:
            message = self.connection.recv()
            self.deadline = time.monotonic() + self._patience
            return message
        # A process that the worker started may hold its end of the connection open.
        if self._process.poll() is not None and not self.connection.poll():
            raise EOFError
        if time.monotonic() >= self.deadline:
            raise TimeoutError
        return None

    def refusal(self, late: bool) -> UsageError:
        """Return the error of a worker that does not load the functions."""
        ended = f"ended while importing ({self.status()})"
        return UsageError(
            "A process for reward functions did not start.",
            have=f"still importing after {_START_SECONDS:g} s" if late else ended,
            want=f"to import {', '.join(each.function for each in self._config.functions)}",
            do="see what it wrote to the terminal, and what those modules do when imported",
        )

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
