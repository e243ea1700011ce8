"""Try calls again that fail for a moment, and give up those that hang.

Pauses grow exponentially and are drawn uniformly from [0, bound] ("full jitter", Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015), so that processes that failed together spread out.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Pulse = Callable[[int], None]
"""A call in progress tells it how many more bytes have moved."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to try, in seconds."""

    tries: int = 24
    """Most attempts of one call."""
    seconds: float = 120.0
    """No attempt begins later than this after the first failure."""
    first_pause: float = 0.25
    """Upper bound of the first pause. It doubles after each failure."""
    longest_pause: float = 15.0
    """Upper bound of every pause."""
    silence: float = 60.0
    """An attempt is given up when nothing has moved for so long."""


class HungError(TimeoutError):
    """An attempt hung and was abandoned. What it began may still happen while this process lives."""


def retry(
    attempt: Callable[[Pulse], T], again: Callable[[Exception, int], bool], policy: RetryPolicy
) -> T:
    """Call `attempt` until it succeeds, the policy is exhausted, or `again(error, failures)` is false.

    Each attempt runs in a daemon thread, so that a library that hangs can be abandoned.
    Raises the last error; `HungError` for a hang.
    """
    chance = random.SystemRandom()  # not the generator that users seed
    failed_at, failures = None, 0
    while True:
        try:
            return _run(attempt, policy.silence)
        except Exception as error:
            failures += 1
            now = time.monotonic()
            failed_at = now if failed_at is None else failed_at
            bound = min(policy.longest_pause, policy.first_pause * 2 ** (failures - 1))
            pause = chance.uniform(0, bound)
            late = now + pause - failed_at > policy.seconds
            if failures >= policy.tries or late or not again(error, failures):
                raise
            time.sleep(pause)


def _run(attempt: Callable[[Pulse], T], silence: float) -> T:
    future: Future[T] = Future()
    moved_at = time.monotonic()

    def pulse(count: int) -> None:
        nonlocal moved_at
        moved_at = time.monotonic()

    def work() -> None:
        try:
            future.set_result(attempt(pulse))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not wait([future], max(0.0, moved_at + silence - time.monotonic())).done:
        if time.monotonic() - moved_at >= silence:
            raise HungError(f"nothing moved for {silence:g} s")
    return future.result()
