from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from burnish.files import remote as module
from burnish.files.remote import Pulse, RetryPolicy, retry


def always(error: Exception, tries: int) -> bool:
    return True


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, none of which took time."""
    made: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        made.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return made


def failing(times: int, error: Exception | None = None) -> Callable[[Pulse], str]:
    left = [times]

    def call(pulse: Pulse) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error or ConnectionError("cut")
        return "done"

    return call


def test_faults_that_pass_are_waited_out(pauses: list[float]) -> None:
    assert retry(failing(5), always, RetryPolicy()) == "done"
    assert len(pauses) == 5


def test_pauses_grow_and_are_bounded_and_drawn(pauses: list[float]) -> None:
    patience = RetryPolicy(tries=40, seconds=1e9, first_pause=1, longest_pause=8)
    for _ in range(30):
        retry(failing(6), always, patience)
    for tries, bound in enumerate((1, 2, 4, 8, 8, 8)):
        drawn = pauses[tries::6]
        assert max(drawn) <= bound
        assert max(drawn) > bound / 2 > min(drawn)
        assert len(set(drawn)) == 30


def test_no_more_attempts_than_allowed(pauses: list[float]) -> None:
    with pytest.raises(ConnectionError):
        retry(failing(3), always, RetryPolicy(tries=3))
    assert len(pauses) == 2


def test_no_longer_than_allowed(pauses: list[float]) -> None:
    with pytest.raises(ConnectionError):
        retry(failing(10**6), always, RetryPolicy(tries=10**6, seconds=50, longest_pause=5))
    assert 40 < sum(pauses) <= 50


def test_what_will_not_pass_is_raised_at_once(pauses: list[float]) -> None:
    def again(error: Exception, tries: int) -> bool:
        return not isinstance(error, PermissionError)

    with pytest.raises(PermissionError):
        retry(failing(1, PermissionError()), again, RetryPolicy())
    assert pauses == []


def test_faults_are_counted_for_whoever_decides(pauses: list[float]) -> None:
    counts: list[int] = []

    def again(error: Exception, tries: int) -> bool:
        counts.append(tries)
        return tries < 3

    with pytest.raises(ConnectionError):
        retry(failing(5), again, RetryPolicy())
    assert counts == [1, 2, 3]


def test_a_call_that_hangs_is_left_behind() -> None:
    leave = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        retry(lambda pulse: leave.wait(30), lambda error, tries: False, RetryPolicy(silence=0.1))
    leave.set()


def test_a_call_that_moves_may_take_its_time() -> None:
    def call(pulse: Pulse) -> str:
        for _ in range(9):
            time.sleep(0.2)
            pulse(1)
        return "done"

    assert retry(call, always, RetryPolicy(silence=1.5)) == "done"


def test_an_interrupt_in_the_call_is_not_a_fault() -> None:
    def call(pulse: Pulse) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retry(call, always, RetryPolicy())
