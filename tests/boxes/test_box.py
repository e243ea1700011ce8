"""Boxes against numpy: every function is compared with marking the elements one by one."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.boxes.box import Box, flat_range, flat_runs, intersect, subtract, whole

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    offsets, sizes = [], []
    for extent in shape:
        start = draw(st.integers(0, extent))
        offsets.append(start)
        sizes.append(draw(st.integers(0, extent - start)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def shape_and_boxes(draw, count):
    shape = draw(shapes)
    return shape, *(draw(boxes_in(shape)) for _ in range(count))


def marks(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


@given(shape_and_boxes(2))
def test_intersect_marks_the_elements_in_both(case):
    shape, a, b = case
    common = intersect(a, b)
    want = marks(shape, [a]) * marks(shape, [b])
    np.testing.assert_array_equal(marks(shape, [] if common is None else [common]), want)


@given(shape_and_boxes(2))
def test_subtract_leaves_each_other_element_once(case):
    shape, a, b = case
    want = marks(shape, [a]) * (1 - marks(shape, [b]))
    rest = subtract(a, b)
    np.testing.assert_array_equal(marks(shape, rest), want)
    assert all(box.elements for box in rest)


@given(shape_and_boxes(2))
def test_relative_to_indexes_the_part_like_the_whole(case):
    shape, a, b = case
    array = np.arange(math.prod(shape)).reshape(shape)
    common = intersect(a, b)
    if common is not None:
        part = array[a.slices]
        np.testing.assert_array_equal(
            part[common.relative_to(a).slices], array[common.slices], strict=True
        )


@given(st.data())
def test_flat_range_is_the_elements_in_order(data):
    shape = data.draw(shapes)
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    array = np.arange(total).reshape(shape)
    boxes = flat_range(shape, start, stop)
    got = [int(x) for box in boxes for x in array[box.slices].ravel()]
    assert got == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape))
    assert all(len(list(flat_runs(shape, box))) == 1 for box in boxes)


@given(shape_and_boxes(1))
def test_flat_runs_are_the_box_in_order_and_maximal(case):
    shape, box = case
    flat = np.arange(math.prod(shape))
    runs = list(flat_runs(shape, box))
    got = [int(x) for start, count in runs for x in flat[start : start + count]]
    assert got == flat.reshape(shape)[box.slices].ravel().tolist()
    assert all(b > a + n for (a, n), (b, _) in itertools.pairwise(runs))


def test_a_scalar_is_one_element():
    assert whole(()).elements == 1
    assert list(flat_runs((), Box((), ()))) == [(0, 1)]
    assert flat_range((), 0, 1) == [Box((), ())]
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert subtract(Box((), ()), Box((), ())) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (4, 3)])
def test_a_flat_range_outside_is_refused(start, stop):
    with pytest.raises(ValueError, match=f"{start}:{stop}"):
        flat_range((2, 3), start, stop)


@pytest.mark.parametrize("box", [Box((0,), (3,)), Box((1, 0), (2, 3)), Box((-1, 0), (1, 1))])
def test_runs_of_a_box_outside_are_refused(box):
    with pytest.raises(ValueError, match=re.escape(str(box))):
        list(flat_runs((2, 3), box))
