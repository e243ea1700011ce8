import pytest

from burnish.tracking.throughput import throughput


def test_all_known() -> None:
    values = throughput(tokens=4000, seconds=2.0, flops=3e12, peak_flops_per_s=6e12, imbalance=1.02)
    assert values == {
        "perf/tokens_per_s": 2000.0,
        "perf/mfu": pytest.approx(0.25),
        "perf/imbalance": 1.02,
    }


def test_what_is_not_known_is_not_there() -> None:
    assert throughput(tokens=10, seconds=2.0) == {"perf/tokens_per_s": 5.0}
    assert throughput(tokens=10, seconds=2.0, flops=1e9) == {"perf/tokens_per_s": 5.0}


def test_no_time_gives_no_rate() -> None:
    assert throughput(tokens=10, seconds=0.0, flops=1e9, peak_flops_per_s=1e9) == {}
