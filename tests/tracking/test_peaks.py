import pytest

from burnish.tracking.peaks import Peaks


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
def peaks(memory: Memory) -> Peaks:
    return Peaks(memory.reset, lambda: memory.highest)


def test_each_part_has_its_own_peak(memory: Memory, peaks: Peaks) -> None:
    memory.use(7_000_000_000)
    memory.use(1_000_000_000)
    with peaks("rollout"):
        memory.use(3_000_000_000)
        memory.use(1_000_000_000)
    with peaks("update"):
        memory.use(2_000_000_000)
    assert peaks.take() == {
        "perf/max_memory_gb/rollout": 3.0,
        "perf/max_memory_gb/update": 2.0,
        "perf/max_memory_gb": 7.0,
    }
    assert peaks.take() == {"perf/max_memory_gb": 7.0}


def test_a_part_within_another_is_that_ones(memory: Memory, peaks: Peaks) -> None:
    with peaks("update"):
        memory.use(5)
        with peaks("inner"):
            memory.use(1)
    assert set(peaks.take()) == {"perf/max_memory_gb/update", "perf/max_memory_gb"}


def test_a_part_that_comes_twice_keeps_the_larger(memory: Memory, peaks: Peaks) -> None:
    for size in (4_000_000_000, 2_000_000_000):
        with peaks("save"):
            memory.use(size)
        memory.use(0)
    assert peaks.take()["perf/max_memory_gb/save"] == 4.0


def test_the_part_that_failed_is_known(memory: Memory, peaks: Peaks) -> None:
    with peaks("rollout"):
        pass
    assert peaks.current is None
    memory.use(2_000_000_000)
    with pytest.raises(MemoryError), peaks("update"):
        raise MemoryError
    assert peaks.current == "update"
    assert peaks.take()["perf/max_memory_gb/update"] == 2.0
