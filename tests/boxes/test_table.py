"""Tables of boxes against the same done box by box."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from burnish.boxes.box import Box, flat_range, intersect, whole
from burnish.boxes.table import BoxIndex, BoxTable, flat_ranges, padded, strides

SHAPES = [(), (5,), (0, 3), (4, 3), (2, 3, 4), (1, 6, 1)]


@st.composite
def boxes(draw):
    number = draw(st.integers(0, len(SHAPES) - 1))
    starts = [draw(st.integers(0, extent)) for extent in SHAPES[number]]
    sizes = [draw(st.integers(0, e - s)) for e, s in zip(SHAPES[number], starts, strict=True)]
    return number, Box(tuple(starts), tuple(sizes))


many = st.lists(boxes(), max_size=12)


@given(many, many)
def test_intersections_are_those_of_every_pair(a, b):
    rows_a, rows_b, common = BoxIndex(BoxTable.of(b, 3)).meeting(BoxTable.of(a, 3))
    found = {
        (i, j): (common.tensor[n], common.box(n, len(SHAPES[common.tensor[n]])))
        for n, (i, j) in enumerate(zip(rows_a.tolist(), rows_b.tolist(), strict=True))
    }
    assert len(found) == len(rows_a)
    assert rows_a.tolist() == sorted(rows_a.tolist())
    expected = {
        (i, j): (tensor, both)
        for i, (tensor, box) in enumerate(a)
        for j, (other, its) in enumerate(b)
        if tensor == other and (both := intersect(box, its)) is not None and both.elements
    }
    assert found == expected


@given(st.data())
def test_flat_ranges_are_those_of_each(data):
    rows = data.draw(st.lists(st.integers(0, len(SHAPES) - 1), max_size=8))
    ends = [
        sorted(data.draw(st.integers(0, math.prod(SHAPES[row]))) for _ in range(2)) for row in rows
    ]
    shapes = np.array([padded(SHAPES[row], 3, 1) for row in rows], np.int64).reshape(-1, 3)
    starts, stops = (np.array([end[n] for end in ends], np.int64) for n in range(2))
    row, offsets, sizes = flat_ranges(shapes, starts, stops)
    found = BoxTable(row, offsets, sizes)
    for number, (which, (start, stop)) in enumerate(zip(rows, ends, strict=True)):
        shape = SHAPES[which]
        parts = [found.box(n, len(shape)) for n in np.flatnonzero(row == number)]
        assert sorted(parts) == sorted(flat_range(shape, start, stop))


def test_strides_are_those_of_c_order():
    shapes = [shape for shape in SHAPES if math.prod(shape)]
    table = strides(np.array([padded(shape, 3, 1) for shape in shapes]))
    for shape, row in zip(shapes, table.tolist(), strict=True):
        expected = [step // 8 for step in np.empty(shape).strides]
        assert row[: len(shape)] == expected


def test_elements_of_scalars_and_of_nothing():
    table = BoxTable.of([(0, whole(())), (1, whole((0, 3)))], 2)
    assert table.elements.tolist() == [1, 0]
    assert len(BoxTable.of([], 1).elements) == 0
