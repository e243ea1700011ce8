"""Score rollouts: call every configured function, weight and add the values.

Functions that may hang run in worker processes. A late worker is killed with all processes that it started. Workers are plain
interpreters: `multiprocessing` would import the main script and torch again, or fork a process with a GPU and threads.
"""

from __future__ import annotations

import errno
import logging
import math
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
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, Self

import numpy as np

from burnish.config.credentials import with_environment
from burnish.config.schema import RewardConfig
from burnish.distributed.environment import environ_of_child, kill_descendants
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.extend import COMPARISONS
from burnish.records import Completion, Prompt, RewardCall, Rollout
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

LOCAL = ("exact_match", "numeric")
"""Functions that run in this process, because they take linear time. Regular expressions and sympy can run for ever."""
_START_SECONDS = 120.0
"""How long a worker may take to import the reward functions' modules."""
_MAX_TIMEOUTS = 8
"""Lost calls in a row, plus one per worker, after which a function is given up; for async functions times `concurrency` / workers."""
_MAX_ENDS = 3
"""How often the process of the same calls may end before they are divided, and a process in a row while it imports."""
# A worker that has not reported its late async calls so many seconds after their deadline counts as blocked.
_LATE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_CHECK_SECONDS = 1.0

_MAX_EXTRAS = 100
_MAX_NAME = 100
"""Most names of further numbers that all verl functions may use in a run, and most characters of each."""

log = logging.getLogger("burnish")

Check = Callable[[], None]
"""A function that is called at least each second during a wait for answers. An exception that it raises ends the wait."""


class _Call(NamedTuple):
    function: int
    """The function's index in `reward.functions`."""
    arguments: Mapping[str, Any]
    size: int
    """How many rollouts it is about."""
    columns: frozenset[str] = frozenset()
    """The arguments that have an entry for each rollout."""
    place: int = 0
    """The index of its first answer among those of its round."""

    def part(self, start: int, stop: int) -> _Call:
        """Return the call about some of the rollouts."""
        arguments = {
            name: value[start:stop] if name in self.columns else value
            for name, value in self.arguments.items()
        }
        return self._replace(arguments=arguments, size=stop - start, place=self.place + start)


class _Bundle(NamedTuple):
    """Numbers of calls that a worker gets together: all calls of an async function, or one call of another."""

    numbers: list[int]
    ends: int = 0
    """How many processes ended while they made these calls."""


def _builtin(name: str) -> Callable[..., float]:
    """Return a function of `LOCAL`."""
    from burnish.rewards import builtin

    function: Callable[..., float] = getattr(builtin, name)
    return function


class RewardPool:
    """Score rollouts with configured functions, in up to `reward.workers` processes that each load all of them."""

    def __init__(self, config: RewardConfig, moved: Callable[[], None] = lambda: None) -> None:
        """Load every function; `moved()` is called as calls end. Raises `UsageError` for an unusable function."""
        config, self._secrets = with_environment(config)
        self._config = config
        self._moved = moved
        self.environments: Any = None
        """A `burnish.environments.pool.EnvironmentPool`, if completions are conversations."""
        self._workers: list[_Worker] = []
        self._warned: set[str] = set()
        self._extras: set[str] = set()
        self._signatures: Sequence[Signature] = ()
        if all(entry.function in LOCAL for entry in config.functions):
            self._signatures = [
                read_signature(entry.function, _builtin(entry.function), entry.kwargs)
                for entry in config.functions
            ]
            return
        try:
            self._workers.append(_Worker(config))
            loading = _Round([], self._workers, config, moved, self._warned)
            while not self._workers[0].signatures:
                loading.listen()
        except BaseException:
            self._end(0)
            raise
        self._signatures = self._workers[0].signatures

    @property
    def columns(self) -> frozenset[str]:
        """The columns that reward functions take by name."""
        accepted = (
            signature.columns | (signature.accepts or frozenset()) for signature in self._signatures
        )
        return frozenset[str]().union(*accepted)

    def check_columns(self, columns: Collection[str], setting: str) -> None:
        """Raise `MissingError` if `columns` lack a required one."""
        for entry, signature in zip(self._config.functions, self._signatures, strict=True):
            for column in sorted(signature.columns - set(columns)):
                raise MissingError(
                    f"the reward function {entry.function!r} needs a column that {setting} lacks",
                    have=f"columns {sorted(columns)}",
                    want=column,
                    do="rename the parameter or the column, or give a value in the function's kwargs",
                )

    def require_answer(self, prompt: Prompt, name: str) -> None:
        """Score a ground truth as completion, twice, since a function may forget that it gets several, and let an environment begin. Raises `UsageError` if it fails."""
        if self.environments is not None:
            self.environments.require_begin(prompt, name)
        if not self._signatures:
            return
        text = prompt.answer if isinstance(prompt.answer, str) else ""
        compares = any(entry.function in COMPARISONS for entry in self._config.functions)
        if compares and isinstance(prompt.answer, list | tuple):
            log.warning("the ground truth of %s is a list: any of its answers counts", name)
        no_ids = np.zeros(0, dtype=np.int64)
        no_numbers = np.zeros(0, dtype=np.float32)
        completion = Completion(no_ids, no_numbers, no_numbers, "stop", weights_version=0)
        rollout, _ = self.score([Rollout(prompt, sample, completion, text) for sample in range(2)])
        if any(call.error for call in rollout.calls):  # None is an answer: it does not apply
            do = "correct the row, or set data.answer_column to the column that the function reads"
            if any(":" in entry.function for entry in self._config.functions):
                do = f"correct the function in reward.functions{message_hint(rollout)}"
            raise UsageError(
                f"the reward fails for {name}",
                have=rollout.reward_error,
                want=f"a number for each completion, such as {text[:80]!r}",
                do=do,
            )

    def score(self, rollouts: Sequence[Rollout], check: Check = lambda: None) -> list[Rollout]:
        """Return the rollouts, in order, with `reward`, `reward_parts` and `reward_error`.

        A failure makes the reward NaN, or counts as the number `on_error`. A TRL function's None is left out; None from all is a
        failure. Further numbers of a verl function are parts, not added. Rewards that rollouts have already, from an environment, stay.
        """
        # A user's function runs in a worker, which is killed and started again if it hangs or dies. Only functions that cannot
        # take long run here (`LOCAL`).
        calls = self._calls(rollouts)
        remote = [job for job in calls if self._local_function(job.function) is None]
        results = iter(self._run(remote, check) if remote else [])
        answers: list[list[Answer]] = [[] for _ in self._signatures]
        for job in calls:
            local = self._local_function(job.function)
            answers[job.function] += (
                call(local, "verl", job.arguments, 1) if local else islice(results, job.size)
            )
        return [
            self._score_rollout(rollout, [column[i] for column in answers])
            for i, rollout in enumerate(rollouts)
        ]

    def _local_function(self, function: int) -> Callable[..., float] | None:
        name = self._config.functions[function].function
        return _builtin(name) if name in LOCAL else None

    def _calls(self, rollouts: Sequence[Rollout]) -> list[_Call]:
        calls = []
        for index, signature in enumerate(self._signatures):
            kwargs = self._config.functions[index].kwargs
            if signature.style == "verl":
                calls += [_Call(index, arguments(signature, kwargs, [one]), 1) for one in rollouts]
            elif rollouts:
                named = arguments(signature, kwargs, rollouts)
                whole = _Call(index, named, len(rollouts), frozenset(named.keys() - kwargs.keys()))
                size = self._config.functions[index].per_call or whole.size
                calls += [
                    whole.part(start, min(start + size, whole.size))
                    for start in range(0, whole.size, size)
                ]
        return calls

    def _score_rollout(self, rollout: Rollout, answers: Sequence[Answer]) -> Rollout:
        answers = [self._without_secrets(answer) for answer in answers]
        reward = rollout.reward
        parts = dict(rollout.reward_parts)
        errors = [rollout.reward_error] if rollout.reward_error else []
        on_error = self._config.on_error
        names = self._config.part_names
        for name, entry, answer in zip(names, self._config.functions, answers, strict=False):
            value = answer.value
            if answer.error is not None:
                errors.append(f"{name}: {answer.error}")
                value = None if on_error == "drop" else on_error
            if value is not None:
                parts[name] = value
                reward += entry.weight * value
            parts |= {
                full: x
                for extra, x in answer.extras.items()
                if self._is_known(full := f"{name}/{extra}")
            }
        if answers and not parts and not errors and not self._config.models:
            errors.append("every reward function answered None")
            reward = 0.0 if on_error == "drop" else on_error
        # Where an environment failed, nothing was rewarded, so no number stands for it.
        if rollout.reward_error or (errors and on_error == "drop"):
            reward = math.nan
        error = "; ".join(errors) or None
        calls = rollout.calls + tuple(
            RewardCall(name, answer.value, answer.error, answer.began, answer.seconds)
            for name, answer in zip(names, answers, strict=False)
        )
        return replace(rollout, reward=reward, reward_parts=parts, reward_error=error, calls=calls)

    def _is_known(self, extra: str) -> bool:
        """Return whether a further number is kept; a function that names others each time would end trackers and page."""
        if extra in self._extras:
            return True
        if len(self._extras) < _MAX_EXTRAS and len(extra) <= _MAX_NAME:
            self._extras.add(extra)
            return True
        if "extras" not in self._warned:
            self._warned.add("extras")
            log.warning(
                "reward functions return too many further numbers: the first %d names of at most %d characters are kept; %s is not",
                _MAX_EXTRAS,
                _MAX_NAME,
                extra[:_MAX_NAME],
            )
        return False

    def _without_secrets(self, answer: Answer) -> Answer:
        """Hide what the function got from the environment, which its error may repeat."""
        if answer.error is None or not self._secrets:
            return answer
        text = answer.error
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return replace(answer, error=text)

    def _run(self, calls: Sequence[_Call], check: Check) -> list[Answer]:
        """Return the workers' answers about all rollouts of the calls, in order; if `check` raises, kill all workers."""
        settings = self._config, self._moved, self._warned
        current = _Round(calls, self._workers, *settings, self._signatures)
        try:
            while current.unanswered:
                current.hand_out()
                check()
                current.listen()
        except BaseException:
            self._end(0)  # the next round must not find late answers of this one
            raise
        return current.answers

    def waits_for(self) -> str:
        """Return the function that runs longest, and its current line. For any thread."""
        busy = [worker for worker in list(self._workers) if worker.left]
        if not busy:
            return ""
        worker = min(busy, key=lambda worker: worker.began)
        return f"the reward {self._config.functions[worker.function].function} ({worker.line()})"

    def close(self) -> None:
        """End all workers."""
        self._end(_CLOSE_SECONDS)
        if self.environments is not None:
            self.environments.close()

    def _end(self, patience: float) -> None:
        for worker in self._workers:
            kill_descendants(worker.pid)  # before the worker ends and orphans them
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

    A missed deadline is an error for the call. If a worker's process ends, a fresh one gets its calls again, and then halves of them,
    so that only the rollout fails that ends it again and again. A function is given up as `_MAX_TIMEOUTS` says. One worker makes an
    async function's calls, `concurrency` at a time. If one blocks the event loop, all running ones are killed.
    """

    def __init__(
        self,
        calls: Sequence[_Call],
        workers: list[_Worker],
        config: RewardConfig,
        moved: Callable[[], None],
        warned: set[str],
        signatures: Sequence[Signature] = (),
    ) -> None:
        """`warned` has the warnings that were logged."""
        starts = np.cumsum([0, *(job.size for job in calls)]).tolist()
        self._calls = [job._replace(place=p) for job, p in zip(calls, starts, strict=False)]
        self._workers = workers
        self._config = config
        self._moved = moved
        self._warned = warned
        self.unanswered: int = starts[-1]
        """How many rollouts have no answer yet."""
        self.answers = [Answer(None)] * self.unanswered
        self._late = f"no answer within {config.timeout_seconds:g} s"
        share = 1 + _MAX_TIMEOUTS / config.workers
        self._most_lost = [
            share * (config.concurrency if signature.is_async else config.workers)
            for signature in signatures
        ]
        self._lost: Counter[int] = Counter()
        self._ends: Counter[int] = Counter()
        """By function: processes that ended since its last answer, without those whose calls are divided."""
        self._imports_lost = 0
        bundles: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, job in enumerate(calls):
            together = signatures[job.function].is_async
            bundles[job.function, -1 if together else number].append(number)
        # Shuffled, so that hanging calls, such as all samples of one prompt, do not come in a row.
        rng = random.Random(0)
        mixed = [rng.sample(bundle, len(bundle)) for bundle in bundles.values()]
        rng.shuffle(mixed)
        self._waiting = deque(_Bundle(numbers) for numbers in sorted(mixed, key=len, reverse=True))
        self._again: deque[_Bundle] = deque()
        """Bundles whose process has ended. Only a fresh process gets one."""

    def hand_out(self) -> None:
        """Give waiting calls to idle workers, and start workers for the others."""
        loading = sum(not worker.signatures for worker in self._workers)
        coming = loading + self._config.workers - len(self._workers)
        for worker in [worker for worker in self._workers if worker.is_idle]:
            waiting = self._again if worker.is_fresh and self._again else self._waiting
            if waiting:
                worker.ask(waiting.popleft(), self._calls)
            elif len(self._again) > coming:
                self._remove(worker)  # a fresh one takes its place
                coming += 1
        wanted = len(self._waiting) + len(self._again) - loading
        missing = min(wanted, self._config.workers - len(self._workers))
        self._workers += [_Worker(self._config) for _ in range(missing)]

    def listen(self) -> None:
        """Wait at most a second for messages of workers, and take them in."""
        working = {worker.connection: worker for worker in self._workers if not worker.is_idle}
        patience = min(worker.deadline for worker in working.values()) - time.monotonic()
        ready = wait(working, min(max(patience, 0.0), _CHECK_SECONDS))
        for connection, worker in working.items():
            try:
                message = worker.receive(is_there=connection in ready)
            except TimeoutError as error:
                if not worker.signatures:
                    raise worker.refusal(late=True) from error
                self._lose(worker, worker.under_way, self._late, ended=True)
                continue
            except (EOFError, OSError) as error:
                self._restart(worker, error)
                continue
            if isinstance(message, BurnishError):
                raise message
            if message is None:
                continue
            if not worker.signatures:
                worker.signatures = message
                self._imports_lost = 0
                continue
            number, answers = message
            if answers is None:
                self._lose(worker, [number], self._late, ended=False)
            else:
                worker.left.remove(number)
                self._answer(number, answers)
                self._moved()
                del self._lost[worker.function], self._ends[worker.function]

    def _restart(self, worker: _Worker, error: Exception) -> None:
        """Have the calls of a worker whose process ended made again, by fresh processes."""
        if not worker.signatures:
            self._imports_lost += 1
            if self._imports_lost >= _MAX_ENDS:
                raise worker.refusal(late=False) from error
            self._warn_once(f"a process for reward functions {worker.end_text()}")
            self._remove(worker)
            self._workers.append(_Worker(self._config))
            return
        numbers = worker.under_way
        ends = worker.ends + 1
        why = f"its process {worker.end_text()}"
        calls = [self._calls[number] for number in numbers]
        is_again = ends < _MAX_ENDS
        is_alone = sum(call.size for call in calls) == 1
        self._ends[worker.function] += is_again or is_alone
        is_given_up = self._ends[worker.function] >= self._config.workers + _MAX_TIMEOUTS
        if is_given_up or (is_alone and not is_again):
            self._lose(worker, numbers, why, ended=True, is_given_up=is_given_up)
            return
        name = self._config.functions[worker.function].function
        self._warn_once(f"the process of the reward {name} {worker.end_text()}")
        self._moved()
        rest = [number for number in worker.left if number not in numbers]
        self._waiting.extendleft([_Bundle(rest)] if rest else [])
        self._remove(worker)
        if is_again:
            self._again.append(_Bundle(numbers, ends))
            return
        if len(calls) == 1:
            (number,) = numbers
            (call,) = calls
            numbers = [number, len(self._calls)]
            self._calls[number] = call.part(0, call.size // 2)
            self._calls.append(call.part(call.size // 2, call.size))
        middle = len(numbers) // 2
        for half in (numbers[middle:], numbers[:middle]):  # the first half comes first
            # One more end of a half divides it again, without further tries.
            self._again.appendleft(_Bundle(half, ends - 1))

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s; a fresh process makes its calls again", what)

    def _lose(
        self,
        worker: _Worker,
        numbers: list[int],
        error: str,
        *,
        ended: bool,
        is_given_up: bool = False,
    ) -> None:
        """Fail calls of a worker. After too many in a row, give their function up."""
        self._fail(numbers, error, worker.began)
        self._lost[worker.function] += len(numbers)
        is_given_up |= self._lost[worker.function] >= self._most_lost[worker.function]
        worker.left = [number for number in worker.left if number not in numbers]
        if ended or (is_given_up and worker.left):
            self._waiting.extendleft([_Bundle(worker.left)] if worker.left else [])
            self._remove(worker)
        if is_given_up:
            for queue in (self._waiting, self._again):
                bundles = list(queue)
                queue.clear()
                for bundle in bundles:
                    if self._calls[bundle.numbers[0]].function == worker.function:
                        self._fail(bundle.numbers, f"given up: call after call: {error}")
                    else:
                        queue.append(bundle)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end(0)
        worker.release()

    def _fail(self, numbers: Sequence[int], error: str, began: float | None = None) -> None:
        self._moved()
        for number in numbers:
            count = self._calls[number].size
            text = error if count == 1 else f"{error} for {count} completions"
            answers = [Answer(None, text)] * count
            self._answer(number, answers if began is None else timed(answers, began))

    def _answer(self, number: int, answers: Sequence[Answer]) -> None:
        place = self._calls[number].place
        self.answers[place : place + len(answers)] = answers
        self.unanswered -= len(answers)


class _Worker:
    signatures: Sequence[Signature] = ()
    """Of all functions; empty while it loads them."""

    def __init__(self, config: RewardConfig) -> None:
        """Start a process that loads the functions."""
        self._config = config
        self.function = 0
        self.began = 0.0
        self.at_once = 1
        self.ends = 0
        """The function of its current calls, when it got them, how many run at a time, and how many processes they have ended."""
        self.left: list[int] = []
        """Numbers of its current calls that it has not answered."""
        self._patience = _START_SECONDS
        self.deadline = time.monotonic() + _START_SECONDS
        self.connection: Connection[Any, Any]
        self.connection, worker_end = Pipe()
        self._stack = TemporaryFile()  # noqa: SIM115 - closed by `release`
        with worker_end:
            command = [sys.executable, "-m", "burnish.rewards.worker"]
            self._process = subprocess.Popen(
                [*command, *map(str, (worker_end.fileno(), os.getpid(), self._stack.fileno()))],
                stdin=subprocess.DEVNULL,
                env=environ_of_child(),
                pass_fds=[worker_end.fileno(), self._stack.fileno()],
                # With a session of its own, the worker does not get the terminal's ctrl-C, and its group can be killed.
                start_new_session=True,
            )
        named = [(entry.function, entry.kwargs) for entry in config.functions]
        self._send((named, config.concurrency, config.timeout_seconds, sys.argv, sys.path))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        return bool(self.signatures) and not self.left

    @property
    def is_fresh(self) -> bool:
        """Whether it has made no call yet."""
        return not self.began

    @property
    def under_way(self) -> list[int]:
        """The calls that it is making."""
        return self.left[: self.at_once]

    def ask(self, bundle: _Bundle, calls: Sequence[_Call]) -> None:
        """Send calls of one function."""
        numbers = bundle.numbers
        self.ends = bundle.ends
        self.function = calls[numbers[0]].function
        self.began = time.time()
        is_async = self.signatures[self.function].is_async
        self.at_once = self._config.concurrency if is_async else 1
        self._patience = self._config.timeout_seconds + (_LATE_SECONDS if is_async else 0)
        self.deadline = time.monotonic() + self._patience
        self.left = [*numbers]
        self._send((self.function, [(i, calls[i].arguments, calls[i].size) for i in numbers]))

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
        return UsageError(
            "a process for reward functions did not start",
            have=f"still importing after {_START_SECONDS:g} s" if late else self.end_text(),
            want=f"to import {', '.join(entry.function for entry in self._config.functions)}",
            do="see what it wrote to the terminal, and what those modules do when imported",
        )

    def line(self) -> str:
        """Return a call's current line, such as `rewards.py line 12 in check`."""
        self._stack.seek(0)
        self._stack.truncate()
        self._process.send_signal(STACK_SIGNAL)
        text = ""
        deadline = time.monotonic() + _CLOSE_SECONDS
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

    def end(self, patience: float) -> int:
        """Kill the worker's programs and end it, by force after `patience` seconds."""
        kill_descendants(self.pid)
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        with suppress(ProcessLookupError):  # another thread has killed it
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def end_text(self) -> str:
        """Say how its process ended, and end it if it has only closed its connection."""
        returncode = self.end(_CLOSE_SECONDS)
        how = f"exit status {returncode}"
        if returncode < 0:
            how = f"signal {signal.Signals(-returncode).name}"
        if returncode == errno.ENOMEM:
            how = "MemoryError"
        return f"ended {'' if self.signatures else 'while importing '}({how})"
