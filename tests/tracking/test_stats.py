import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.tracking.stats import EffectiveShare, Max, Mean, Stats, Sum

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(numbers, st.integers(0, 30))
def test_merged_parts_give_what_the_whole_gives(values: list[float], cut: int) -> None:
    parts = [part for part in (values[:cut], values[cut:]) if part]
    stats = Stats()
    for part in parts:
        mean = Mean(sum(part), len(part))
        squares = sum(value**2 for value in part)
        share = EffectiveShare(sum(part), squares, len(part))
        stats = stats.merge(Stats(mean=mean, sum=Sum(sum(part)), max=Max(max(part)), share=share))
    divisor = len(values) * sum(value**2 for value in values)
    assert stats.values_by_name() == {
        "mean": pytest.approx(sum(values) / len(values), abs=1e-6),
        "sum": pytest.approx(sum(values), abs=1e-6),
        "max": max(values),
        "share": pytest.approx(sum(values) ** 2 / divisor if divisor else math.nan, nan_ok=True),
    }


def test_tensors_are_numbers_too() -> None:
    two, three = torch.tensor(2.0), torch.tensor(3.0)
    one = Stats(mean=Mean(torch.tensor(6.0), torch.tensor(4)), mixed=Max(two), max=Max(two))
    both = one.merge(Stats(mean=Mean(2.0, 4), mixed=Max(3.0), max=Max(three)))
    assert isinstance(both["max"].largest, torch.Tensor)  # nothing waited for the device
    assert both.values_by_name() == {"mean": 1.0, "mixed": 3.0, "max": 3.0}


def test_the_mean_of_nothing_is_not_a_number() -> None:
    assert math.isnan(Mean(0.0, 0).value())


def test_other_names_are_kept() -> None:
    merged = Stats(a=Sum(1.0)).merge(Stats(b=Sum(2.0)))
    assert merged.values_by_name() == {"a": 1.0, "b": 2.0}
