"""Plans and rounds against marking elements one by one."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.random_layouts import F32, piece, random_layout, tables

from burnish.boxes.box import Box, intersect, whole
from burnish.boxes.plan import plan, schedule
from burnish.errors import IncompatibleError, MissingError

shape_sets = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1
)


def marked(shape, box, counts=None):
    counts = np.zeros(shape, dtype=int) if counts is None else counts
    counts[box.slices] += 1
    return counts


@given(shape_sets, st.integers(1, 4), st.integers(0, 1 << 30))
def test_every_wanted_element_comes_once_from_a_holder(shapes, world, seed):
    rng = random.Random(seed)
    have = random_layout(rng, shapes, world, replicas=3)
    want = random_layout(rng, shapes, world, replicas=2)
    seen = defaultdict(lambda: None)
    for move in plan(tables(have), tables(want)):
        tensor, source = have[move.source][move.have]
        wanted, target = want[move.target][move.want]
        assert tensor.name == wanted.name
        assert intersect(source, move.box) == intersect(target, move.box) == move.box
        place = (move.target, move.want)
        seen[place] = marked(wanted.shape, move.box, seen[place])
    for rank, pieces in enumerate(want):
        for number, (tensor, box) in enumerate(pieces):
            if box.elements:
                np.testing.assert_array_equal(seen[rank, number], marked(tensor.shape, box))


@given(shape_sets, st.integers(1, 4), st.integers(0, 1 << 30))
def test_what_a_rank_has_itself_does_not_travel(shapes, world, seed):
    rng = random.Random(seed)
    have = random_layout(rng, shapes, world, replicas=3)
    want = random_layout(rng, shapes, world, replicas=2)
    for move in plan(tables(have), tables(want)):
        if move.source != move.target:
            (name, shape, _), _ = have[move.source][move.have]
            own = [box for tensor, box in have[move.target] if tensor.name == name]
            mine = sum(marked(shape, box) for box in own) if own else np.zeros(shape)
            assert not mine[move.box.slices].any()


def by_round(moves, world, limit, group, groups):
    """(group, round, moves) put together from what each rank is told; a move is told to both its ranks."""
    told = schedule(moves, range(world), limit, group, groups)
    for number, shares in enumerate(zip(*told, strict=True)):
        assert len({len(share.waves) for share in shares}) == 1  # they meet as often
        yield number, None, [m for share in shares for m in share.own]
        for wave, parts in enumerate(zip(*(share.waves for share in shares), strict=True)):
            twice = Counter((rank, m) for rank, part in enumerate(parts) for m in part)
            assert set(twice.values()) <= {1}
            assert all(twice[m.source, m] == twice[m.target, m] == 1 for _, m in twice)
            yield number, wave, list({m for _, m in twice})


@given(
    shape_sets,
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.sampled_from([64, 100, 4096]),
    st.integers(1, 3),
)
def test_rounds_hold_every_element_once_within_the_bound(shapes, world, seed, limit, groups):
    rng = random.Random(seed)
    have = random_layout(rng, shapes, world, replicas=1)
    want = random_layout(rng, shapes, world, replicas=2)
    moves = plan(tables(have), tables(want))
    group = np.array([rng.randrange(groups) for _ in range(len(moves))], np.int64)

    def elements(moves, number):
        return Counter(
            (number, m.source, m.have, m.target, m.want, m.dtype, index)
            for m in moves
            for index in np.ndindex(m.box.sizes)
            for index in [tuple(np.add(index, m.box.offsets).tolist())]
        )

    expected, found = Counter(), Counter()
    for move, number in zip(moves, group.tolist(), strict=True):
        expected += elements([move], number)
    for number, wave, parts in by_round(moves, world, limit, group, groups):
        found += elements(parts, number)
        if wave is not None:
            for end in ("source", "target"):
                load = Counter()
                for move in parts:
                    load[getattr(move, end)] += move.bytes
                assert parts
                assert max(load.values()) <= limit
    assert found == expected


def test_own_copies_are_preferred_and_others_take_turns():
    shape = (8, 2)
    full = [piece(name, shape, whole(shape), F32) for name in "abcdef"]
    nothing_moves = plan(tables([full] * 3), tables([full] * 3))
    assert (nothing_moves.source == nothing_moves.target).all()
    asked = plan(tables([full, full, full, []]), tables([[], [], [], full]))
    assert Counter(asked.source.tolist()) == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("world", [2, 8, 64])
def test_full_copies_from_shards_fill_rounds_on_all_ranks_at_once(world):
    rows = 1024
    shape = (world * rows, 64)
    have = [[piece("w", shape, Box((r * rows, 0), (rows, 64)), F32)] for r in range(world)]
    want = [[piece("w", shape, whole(shape), F32)]] * world
    limit = 128 << 10
    needed = rows * 64 * 4 * (world - 1) / limit
    [[group]] = schedule(plan(tables(have), tables(want)), [0], limit)
    assert len(group.waves) <= 1.35 * needed + 1


def test_one_sends_everything_in_as_few_rounds_as_it_can():
    world, shape = 4, (64, 64)
    have = [[piece("w", shape, whole(shape), F32)], *[[]] * (world - 1)]
    want = [[]] + [[piece("w", shape, whole(shape), F32)]] * (world - 1)
    [[group]] = schedule(plan(tables(have), tables(want)), [3], 4096)
    assert len(group.waves) == 64 * 64 * 4 * (world - 1) // 4096


def test_ranks_that_plan_the_same_have_the_same_digest():
    have = [
        [piece("w", (4, 4), Box((0, 0), (2, 4)), F32)],
        [piece("w", (4, 4), Box((2, 0), (2, 4)), F32)],
    ]
    want = [[piece("w", (4, 4), whole((4, 4)), F32)], []]
    digest = plan(tables(have), tables(want)).digest()
    assert plan(tables(have), tables(want)).digest() == digest
    assert plan(tables(have[::-1]), tables(want)).digest() != digest


def test_what_nobody_holds_is_named_with_its_box():
    have = [
        [piece("w", (4, 4), Box((0, 0), (2, 4)), F32)],
        [piece("w", (4, 4), Box((3, 0), (1, 4)), F32)],
    ]
    want = [[piece("w", (4, 4), whole((4, 4)), F32)], []]
    with pytest.raises(MissingError, match=r"(?s)\bw\b.*\[2, 0\].*\[1, 4\]"):
        plan(tables(have), tables(want))
    with pytest.raises(MissingError, match=r"\bv\b"):
        plan(tables(have), tables([[piece("v", (1,), whole((1,)), F32)], []]))
    with pytest.raises(MissingError, match=r"\bw\b"):
        plan(tables([[], []]), tables(want))


def test_shapes_that_differ_are_refused():
    have = [[piece("w", (4, 4), whole((4, 4)), F32)]]
    with pytest.raises(IncompatibleError, match=r"(?s)\bw\b.*\[4, 4\].*\[5, 4\]"):
        plan(tables(have), tables([[piece("w", (5, 4), whole((5, 4)), F32)]]))


def test_a_wave_too_small_for_anything_is_refused():
    with pytest.raises(ValueError, match="63 bytes"):
        schedule(plan(tables([[]]), tables([[]])), [0], 63)


def test_strided_and_uneven_shards_go_where_they_are_wanted():
    """Rows dealt out like cards (tensor parallel on top of sharded data parallel) to uneven rows."""
    shape, world = (12, 2), 3
    have = [
        [piece("w", shape, Box((row, 0), (1, 2)), F32) for row in range(rank, 12, world)]
        for rank in range(world)
    ]
    cuts = [0, 1, 1, 12]
    want = [[piece("w", shape, Box((a, 0), (b - a, 2)), F32)] for a, b in itertools.pairwise(cuts)]
    moves = list(plan(tables(have), tables(want)))
    assert [(m.source, m.target, m.box.offsets[0]) for m in moves] == [
        (row % world, 0 if row < 1 else 2, row) for row in range(12)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.float8_e5m2, torch.complex64])
def test_a_scalar_of_any_dtype_is_one_move(dtype):
    scalar = piece("s", (), Box((), ()), dtype)
    [move] = plan(tables([[scalar], []]), tables([[], [scalar]]))
    assert (move.box, move.bytes, move.dtype) == (Box((), ()), dtype.itemsize, dtype)
