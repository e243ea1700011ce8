from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from burnish.algorithms.schedule import learning_rate
from burnish.config.schema import OptimConfig

TOTAL, WARMUP, LR = 40, 7, 3e-4


def transformers_rates(make, **settings) -> list[float]:
    """What an optimizer under transformers' schedule sees at each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = make(optimizer, **settings)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def ours(**settings) -> list[float]:
    config = OptimConfig(lr=LR, **settings)
    return [learning_rate(step, TOTAL, config) for step in range(TOTAL)]


@pytest.mark.parametrize("warmup", [0, 1, WARMUP, TOTAL + 5])
def test_constant_equals_transformers(warmup: int) -> None:
    want = transformers_rates(
        optimization.get_constant_schedule_with_warmup, num_warmup_steps=warmup
    )
    assert ours(schedule="constant", warmup_steps=warmup) == pytest.approx(want)


@pytest.mark.parametrize("warmup", [0, 1, WARMUP, TOTAL + 5])
def test_linear_equals_transformers(warmup: int) -> None:
    want = transformers_rates(
        optimization.get_linear_schedule_with_warmup,
        num_warmup_steps=warmup,
        num_training_steps=TOTAL,
    )
    assert ours(schedule="linear", warmup_steps=warmup) == pytest.approx(want)


@pytest.mark.parametrize("warmup", [0, 1, WARMUP, TOTAL + 5])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_cosine_equals_transformers(warmup: int, ratio: float) -> None:
    want = transformers_rates(
        optimization.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=warmup,
        num_training_steps=TOTAL,
        min_lr_rate=ratio,
    )
    assert ours(schedule="cosine", warmup_steps=warmup, min_lr_ratio=ratio) == pytest.approx(want)


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_wsd_equals_transformers(ratio: float) -> None:
    want = transformers_rates(
        optimization.get_wsd_schedule,
        num_warmup_steps=WARMUP,
        num_decay_steps=12,
        num_training_steps=TOTAL,
        decay_type="linear",
        min_lr_ratio=ratio,
    )
    got = ours(schedule="wsd", warmup_steps=WARMUP, decay_steps=12, min_lr_ratio=ratio)
    # transformers' min_lr_ratio lifts the warm-up too.
    assert got[WARMUP:] == pytest.approx(want[WARMUP:])
    if ratio == 0:
        assert got == pytest.approx(want)


def test_linear_ends_at_its_minimum() -> None:
    config = OptimConfig(lr=LR, schedule="linear", min_lr_ratio=0.25)
    assert learning_rate(TOTAL, TOTAL, config) == pytest.approx(LR / 4)
    assert learning_rate(TOTAL + 9, TOTAL, config) == pytest.approx(LR / 4)


def test_a_wsd_decay_longer_than_the_run_begins_after_the_warmup() -> None:
    got = ours(schedule="wsd", warmup_steps=WARMUP, decay_steps=10 * TOTAL)
    assert got == pytest.approx(ours(schedule="linear", warmup_steps=WARMUP))


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 20),
    decay=st.integers(0, 20),
    total=st.integers(1, 30),
    ratio=st.floats(0, 1),
)
def test_stays_between_its_bounds_and_never_rises_after_the_warmup(
    schedule: str, warmup: int, decay: int, total: int, ratio: float
) -> None:
    config = OptimConfig(
        lr=1.0, schedule=schedule, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=ratio
    )
    rates = [learning_rate(step, total, config) for step in range(total + 3)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    after = rates[warmup:]
    assert all(rate >= ratio - 1e-12 for rate in after)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
