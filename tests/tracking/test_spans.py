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


def taken(spans: Spans) -> dict[str, float]:
    """The seconds, without the memory of a device that has none."""
    return {name: value for name, value in spans.added({}).items() if name.startswith("timing_s/")}


def test_seconds_add_up_by_name_and_nest(clock: Clock) -> None:
    spans = Spans(clock=clock)
    for _ in range(2):
        with spans("rollout"):
            clock.now += 1
            with spans("generate"):
                clock.now += 2
    with spans("update"):
        clock.now += 4
    clock.now += 0.5
    assert taken(spans) == {
        "timing_s/rollout": 6.0,
        "timing_s/rollout.generate": 4.0,
        "timing_s/update": 4.0,
        "timing_s/step": 10.5,
    }


def test_taking_starts_again(clock: Clock) -> None:
    spans = Spans(clock=clock)
    with spans("update"):
        clock.now += 4
    taken(spans)
    clock.now += 1
    assert taken(spans) == {"timing_s/step": 1.0}


def test_an_open_span_counts_where_it_ends(clock: Clock) -> None:
    spans = Spans(clock=clock)
    with spans("save"):
        clock.now += 1
        assert taken(spans) == {"timing_s/step": 1.0}
        clock.now += 2
    assert taken(spans) == {"timing_s/save": 3.0, "timing_s/step": 2.0}


def test_what_a_span_began_is_waited_for_within_it(clock: Clock) -> None:
    """An accelerator still computes when the host has queued everything."""

    def settle() -> None:
        clock.now += 2

    spans = Spans(clock=clock, settle=settle)
    with spans("update"):
        clock.now += 1
    assert taken(spans)["timing_s/update"] == 3.0


def test_a_span_that_raises_is_counted_and_closed(clock: Clock) -> None:
    spans = Spans(clock=clock)

    def fail() -> None:
        with spans("rollout"):
            clock.now += 3
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with spans("update"):
        clock.now += 1
    assert taken(spans) == {"timing_s/rollout": 3.0, "timing_s/update": 1.0, "timing_s/step": 4.0}


def test_seconds_are_added_to_those_of_a_line(clock: Clock) -> None:
    spans = Spans(clock=clock)
    with spans("save"):
        clock.now += 2
    line = spans.added({"loss": 1.0, "timing_s/step": 5.0, "timing_s/update": 4.0})
    assert line == {
        "loss": 1.0,
        "timing_s/update": 4.0,
        "timing_s/save": 2.0,
        "timing_s/step": 7.0,
        "perf/max_memory_gb/save": 0.0,
        "perf/max_memory_gb/all": 0.0,
    }


class Memory:
    """A device whose use is set by hand."""

    def __init__(self) -> None:
        self.used = self.highest = 0

    def use(self, size: int) -> None:
        self.used = size
        self.highest = max(self.highest, size)

    def reset(self) -> None:
        self.highest = self.used


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def peaks(memory: Memory) -> Spans:
    return Spans(reset_peak=memory.reset, peak=lambda: memory.highest)


def memory_of(spans: Spans) -> dict[str, float]:
    return {name: value for name, value in spans.added({}).items() if name.startswith("perf/")}


def test_each_part_has_its_own_peak(memory: Memory, peaks: Spans) -> None:
    memory.use(7_000_000_000)
    memory.use(1_000_000_000)
    with peaks("rollout"):
        memory.use(3_000_000_000)
        memory.use(1_000_000_000)
    with peaks("update"):
        memory.use(2_000_000_000)
    assert memory_of(peaks) == {
        "perf/max_memory_gb/rollout": 3.0,
        "perf/max_memory_gb/update": 2.0,
        "perf/max_memory_gb/all": 7.0,
    }
    assert memory_of(peaks) == {"perf/max_memory_gb/all": 7.0}


def test_a_part_within_another_is_that_ones(memory: Memory, peaks: Spans) -> None:
    with peaks("update"):
        memory.use(5)
        with peaks("inner"):
            memory.use(1)
    assert set(memory_of(peaks)) == {"perf/max_memory_gb/update", "perf/max_memory_gb/all"}


def test_a_part_that_comes_twice_keeps_the_larger(memory: Memory, peaks: Spans) -> None:
    for size in (4_000_000_000, 2_000_000_000):
        with peaks("save"):
            memory.use(size)
        memory.use(0)
    assert memory_of(peaks)["perf/max_memory_gb/save"] == 4.0


def test_the_part_that_failed_is_known(memory: Memory, peaks: Spans) -> None:
    with peaks("rollout"):
        pass
    assert peaks.current is None
    memory.use(2_000_000_000)
    with pytest.raises(MemoryError), peaks("update"):
        raise MemoryError
    assert peaks.current == "update"
    assert memory_of(peaks)["perf/max_memory_gb/update"] == 2.0
