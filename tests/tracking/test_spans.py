import pytest

from burnish.tracking.spans import Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_seconds_add_up_by_name_and_nest(clock: Clock) -> None:
    spans = Spans(clock)
    for _ in range(2):
        with spans("rollout"):
            clock.now += 1
            with spans("generate"):
                clock.now += 2
    with spans("update"):
        clock.now += 4
    clock.now += 0.5
    assert spans.take() == {
        "timing_s/rollout": 6.0,
        "timing_s/rollout/generate": 4.0,
        "timing_s/update": 4.0,
        "timing_s/step": 10.5,
    }


def test_taking_starts_again(clock: Clock) -> None:
    spans = Spans(clock)
    with spans("update"):
        clock.now += 4
    spans.take()
    clock.now += 1
    assert spans.take() == {"timing_s/step": 1.0}


def test_an_open_span_counts_where_it_ends(clock: Clock) -> None:
    spans = Spans(clock)
    with spans("save"):
        clock.now += 1
        assert spans.take() == {"timing_s/step": 1.0}
        clock.now += 2
    assert spans.take() == {"timing_s/save": 3.0, "timing_s/step": 2.0}


def test_what_a_span_began_is_waited_for_within_it(clock: Clock) -> None:
    """An accelerator still computes when the host has queued everything."""

    def settle() -> None:
        clock.now += 2

    spans = Spans(clock, settle=settle)
    with spans("update"):
        clock.now += 1
    assert spans.take()["timing_s/update"] == 3.0


def test_a_span_that_raises_is_counted_and_closed(clock: Clock) -> None:
    spans = Spans(clock)

    def fail() -> None:
        with spans("rollout"):
            clock.now += 3
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with spans("update"):
        clock.now += 1
    assert spans.take() == {"timing_s/rollout": 3.0, "timing_s/update": 1.0, "timing_s/step": 4.0}
