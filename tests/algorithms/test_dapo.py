from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.dapo import has_variance, overlong_penalty, select_groups
from burnish.config.algorithm import DynamicSamplingConfig, OverlongConfig

ON = DynamicSamplingConfig(enabled=True, max_refills=2)
FLAT, MIXED = False, True


@given(groups=st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), max_size=4), max_size=8))
def test_variance(groups: list[list[float]]) -> None:
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    found = has_variance(np.array([*chain(*groups)]), numbers, len(groups))
    assert found.tolist() == [len(set(group)) > 1 for group in groups]


def chosen(*asked: Any) -> tuple[tuple[int, ...], int]:
    keep, refill = select_groups(*asked)
    return tuple(keep.tolist()), refill


def test_off_keeps_what_comes_first() -> None:
    off = DynamicSamplingConfig(enabled=False)
    assert chosen(np.array([FLAT, MIXED, FLAT]), 2, 0, off) == ((0, 1), 0)


def test_missing_groups_are_asked_for_until_the_rounds_are_spent() -> None:
    groups = np.array([FLAT, MIXED, FLAT, FLAT])
    assert chosen(groups, 3, 0, ON) == ((1,), 2)
    assert chosen(groups, 3, 1, ON) == ((1,), 2)
    assert chosen(groups, 3, 2, ON) == ((1,), 0)


def test_a_full_batch_asks_for_nothing_and_leaves_the_rest() -> None:
    assert chosen(np.array([MIXED, FLAT, MIXED, MIXED]), 2, 0, ON) == ((0, 2), 0)


def test_no_group_has_variance() -> None:
    assert chosen(np.array([FLAT, FLAT]), 2, 2, ON) == ((), 0)


@given(kinds=st.lists(st.booleans(), max_size=30), wanted=st.integers(1, 8))
def test_the_loop_ends_within_its_bound(kinds: list[bool], wanted: int) -> None:
    stream = iter(kinds + [FLAT] * 100)
    groups = [next(stream) for _ in range(wanted)]
    refills = 0
    keep, refill = chosen(np.array(groups), wanted, refills, ON)
    while refill:
        groups += [next(stream) for _ in range(refill)]
        refills += 1
        keep, refill = chosen(np.array(groups), wanted, refills, ON)
    assert refills <= ON.max_refills
    assert len(keep) <= wanted
    assert all(groups[i] for i in keep)
    assert len(keep) == wanted or refills == ON.max_refills


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (130, -1)]
)
def test_equation_13(length: int, penalty: float) -> None:
    got = overlong_penalty(np.array(length), 100, OverlongConfig(buffer=20))
    assert got == pytest.approx(penalty)
    scaled = overlong_penalty(np.array(length), 100, OverlongConfig(buffer=20, penalty=0.5))
    assert scaled == pytest.approx(penalty / 2)


def test_no_buffer_no_penalty() -> None:
    assert overlong_penalty(np.array(100), 100, OverlongConfig()) == 0
