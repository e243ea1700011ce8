"""Calls that may hang or fail for a moment: a bound on their silence, and trying again.

Pauses grow exponentially and are drawn from the whole range below that ("full jitter", Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so that many processes that failed
together do not come back together. Left out: which faults are worth another try, which the caller says.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

Pulse = Callable[[int], None]
"""What a call tells that so many more bytes have moved; it is alive."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to put up with faults, in seconds."""

    tries: int = 24
    """Most attempts of one call that fail one after another."""
    seconds: float = 120.0
    """No attempt is begun later than this after the first one failed."""
    first_pause: float = 0.25
    """Bound of the pause after the first fault; doubled after each."""
    longest_pause: float = 15.0
    """Bound of all pauses."""
    silence: float = 60.0
    """An attempt during which nothing has moved for so long is given up."""


class LeftBehind(TimeoutError):
    """An attempt hung and was left behind: what it had begun may still come to pass while this process lives."""


def persist(
    attempt: Callable[[Pulse], T], again: Callable[[Exception, int], bool], patience: Patience
) -> T:
    """What `attempt` returns, tried again while patience lasts and `again` says so of the fault and how many there were.

    An attempt runs in a thread of its own, so that a library that hangs can be left behind: such a
    thread ends with the process, and what it had begun may still come to pass. Raises the last
    fault; a hang is `LeftBehind`.
    """
    chance = random.SystemRandom()  # not the generator that users seed
    failed_at, tries = None, 0
    while True:
        try:
            return _Attempt(attempt).result(patience.silence)
        except Exception as error:
            tries += 1
            moment = time.monotonic()
            failed_at = moment if failed_at is None else failed_at
            bound = min(patience.longest_pause, patience.first_pause * 2 ** (tries - 1))
            pause = chance.uniform(0, bound)
            late = moment + pause - failed_at > patience.seconds
            if tries >= patience.tries or late or not again(error, tries):
                raise
            time.sleep(pause)


class _Attempt(Generic[T]):
    """A call under way in a thread."""

    def __init__(self, call: Callable[[Pulse], T]) -> None:
        self._call = call
        self._moved_at = time.monotonic()
        self._done = threading.Event()
        self._value: T
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._call(self._pulse)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the result
            self._error = error
        finally:
            self._done.set()

    def _pulse(self, count: int) -> None:
        self._moved_at = time.monotonic()

    def result(self, silence: float) -> T:
        """Wait for it. Raises what it raised, or `LeftBehind`."""
        while not self._done.wait(max(0.0, self._moved_at + silence - time.monotonic())):
            if time.monotonic() - self._moved_at >= silence:
                raise LeftBehind(f"nothing moved for {silence:g} s")
        if self._error is not None:
            raise self._error
        return self._value
