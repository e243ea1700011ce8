"""The meter of `bench.planning`: what is allocated by whom, and what other threads free."""

from threading import Thread

import pytest
import torch

from bench.planning_meter import Meter, switch

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def _switched_back():
    before = switch().value
    yield
    switch().value = before


def test_the_meter_counts_what_is_there_at_the_highest():
    earlier = torch.empty(SIZE, dtype=torch.uint8)
    meter = Meter()
    with meter.phase("a"):
        torch.empty(3 * SIZE, dtype=torch.uint8)
        kept = torch.empty(SIZE, dtype=torch.uint8)
        torch.empty(3 * SIZE, dtype=torch.uint8)
    with meter.phase("b"):
        pass
    assert meter.peaks == {"a": [4 * SIZE], "b": [SIZE + 4]}
    meter.add("a", 5)
    assert meter.peaks["a"] == [4 * SIZE + 5]
    assert len(earlier) == len(kept) == SIZE


def test_the_meter_knows_what_another_thread_frees():
    """Which is not profiled."""
    meter, held = Meter(), []
    with meter.phase("a"):
        held.append(torch.empty(4 * SIZE, dtype=torch.uint8))
        thread = Thread(target=held.clear)
        thread.start()
        thread.join()
    with meter.phase("a"):
        torch.empty(SIZE, dtype=torch.uint8)
    with meter.phase("a"):
        pass
    assert meter.peaks == {"a": [4 * SIZE, SIZE, 4]}
