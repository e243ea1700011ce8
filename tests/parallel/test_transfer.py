"""Plans against marking elements one by one, and transfers against indexing the whole tensor."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.errors import IncompatibleError, MissingError
from burnish.parallel.boxes import Box, flat_range, subtract, whole
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Piece, Shard, TensorSpec
from burnish.parallel.transfer import Transfer, plan, waves

F32, BF16 = torch.float32, torch.bfloat16


def cut_at_random(rng, box, depth=3):
    """Boxes that make up `box`, disjoint."""
    if depth == 0 or box.elements < 2 or rng.random() < 0.2:
        return [box]
    dim = rng.choice([d for d, size in enumerate(box.sizes) if size > 1])
    size = rng.randint(1, box.sizes[dim] - 1)
    first = Box(box.offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
    return [
        p for part in (first, *subtract(box, first)) for p in cut_at_random(rng, part, depth - 1)
    ]


def random_layout(rng, shapes, world, replicas):
    """Per rank pieces that cover every tensor, some of them several times."""
    ranks = [[] for _ in range(world)]
    for name, shape in shapes.items():
        for _ in range(rng.randint(1, replicas)):
            if rng.random() < 0.3:  # flat ranges, as a distributed optimizer holds them
                total = whole(shape).elements
                cuts = sorted([0, total, *(rng.randint(0, total) for _ in range(world - 1))])
                parts = [b for a, z in itertools.pairwise(cuts) for b in flat_range(shape, a, z)]
            else:
                parts = cut_at_random(rng, whole(shape))
            for box in parts:
                ranks[rng.randrange(world)].append(Piece(name, shape, box, F32))
    return ranks


shape_sets = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1
)


@given(shape_sets, st.integers(1, 4), st.integers(0, 1 << 30))
@settings(deadline=None)
def test_every_wanted_element_comes_once_from_a_holder(shapes, world, seed):
    rng = random.Random(seed)
    have = random_layout(rng, shapes, world, replicas=3)
    want = random_layout(rng, shapes, world, replicas=2)
    seen = defaultdict(lambda: None)
    for move in plan(have, want):
        source, target = have[move.source][move.have], want[move.target][move.want]
        assert source.name == target.name
        assert source.box.contains(move.box)
        assert target.box.contains(move.box)
        counts = seen[move.target, move.want]
        counts = np.zeros(target.shape, dtype=int) if counts is None else counts
        counts[move.box.slices] += 1
        seen[move.target, move.want] = counts
    for target, pieces in enumerate(want):
        for number, piece in enumerate(pieces):
            expected = np.zeros(piece.shape, dtype=int)
            expected[piece.box.slices] = 1
            if piece.box.elements:
                np.testing.assert_array_equal(seen[target, number], expected)


@given(shape_sets, st.integers(1, 4), st.integers(0, 1 << 30), st.sampled_from([64, 100, 4096]))
@settings(deadline=None)
def test_waves_hold_every_remote_element_once_within_the_bound(shapes, world, seed, limit):
    rng = random.Random(seed)
    have = random_layout(rng, shapes, world, replicas=1)
    moves = plan(have, random_layout(rng, shapes, world, replicas=2))
    rounds = waves(moves, limit)

    def elements(moves):
        return Counter(
            (m.source, m.have, m.target, m.want, index)
            for m in moves
            for index in np.ndindex(m.box.sizes)
            for index in [tuple(np.add(index, m.box.offsets).tolist())]
        )

    assert elements(m for wave in rounds for m in wave) == elements(
        m for m in moves if m.source != m.target
    )
    for wave in rounds:
        sent, got = Counter(), Counter()
        for move in wave:
            sent[move.source] += move.bytes
            got[move.target] += move.bytes
        assert max(*sent.values(), *got.values()) <= limit


def test_own_copies_are_preferred_and_others_take_turns():
    shape = (8, 2)
    full = [Piece(name, shape, whole(shape), F32) for name in "abcdef"]
    nothing_moves = plan([full] * 3, [full] * 3)
    assert all(move.source == move.target for move in nothing_moves)
    asked = Counter(move.source for move in plan([full, full, full, []], [[], [], [], full]))
    assert asked == {0: 2, 1: 2, 2: 2}


def test_full_copies_from_shards_fill_waves_on_all_ranks_at_once():
    world, rows = 8, 1024
    shape = (world * rows, 64)
    have = [[Piece("w", shape, Box((r * rows, 0), (rows, 64)), F32)] for r in range(world)]
    want = [[Piece("w", shape, whole(shape), F32)]] * world
    limit = 128 << 10
    needed = rows * 64 * 4 * (world - 1) / limit
    assert len(waves(plan(have, want), limit)) <= 1.35 * needed + 1


def test_what_nobody_holds_is_named_with_its_box():
    have = [
        [Piece("w", (4, 4), Box((0, 0), (2, 4)), F32)],
        [Piece("w", (4, 4), Box((3, 0), (1, 4)), F32)],
    ]
    want = [[Piece("w", (4, 4), whole((4, 4)), F32)], []]
    with pytest.raises(MissingError, match=r"tensor w[^$]*offsets \[2, 0\], sizes \[1, 4\]"):
        plan(have, want)
    with pytest.raises(MissingError, match="tensor v"):
        plan(have, [[Piece("v", (1,), whole((1,)), F32)], []])


def test_shapes_that_differ_are_refused():
    have = [[Piece("w", (4, 4), whole((4, 4)), F32)]]
    with pytest.raises(IncompatibleError, match=r"tensor w[^$]*\[4, 4\][^$]*\[5, 4\]"):
        plan(have, [[Piece("w", (5, 4), whole((5, 4)), F32)]])


def test_a_wave_too_small_for_anything_is_refused():
    with pytest.raises(ValueError, match="63 bytes"):
        waves([], 63)


# Execution: every rank knows the whole tensors, holds parts of them, and asks for other parts.

SHAPES = {"a": (7, 5), "b": (), "c": (0, 3), "d": (300,), "e": (3, 4, 5)}


def whole_tensors(salt=0):
    return {
        name: (torch.arange(whole(shape).elements, dtype=F32) + 1000 * salt + i).reshape(shape) / 7
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def as_shards(pieces, tensors, dtype=F32):
    return [
        Shard(
            TensorSpec(p.name, p.shape, F32), p.box, tensors[p.name][p.box.slices].to(dtype).clone()
        )
        for p in pieces
    ]


def check_redistributes(layout, seed, dtype):
    rng = random.Random(seed)
    have_pieces = random_layout(rng, SHAPES, layout.world, replicas=2)[layout.rank]
    want_pieces = random_layout(rng, SHAPES, layout.world, replicas=2)[layout.rank]
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    transfer = None
    for salt in range(2):  # the second time from the kept plan
        tensors = whole_tensors(salt)
        have, want = as_shards(have_pieces, tensors), as_shards(want_pieces, zeros, dtype)
        transfer = transfer or Transfer(have, want, layout, wave_bytes=256)
        transfer.run(have, want)
        for shard in want:
            expected = tensors[shard.spec.name][shard.box.slices].to(dtype)
            torch.testing.assert_close(shard.tensor, expected, rtol=0, atol=0)
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_redistributes_between_ranks(world):
    assert run_ranks(check_many, world) == [True] * world


def check_many(layout):
    return all(check_redistributes(layout, seed, [F32, BF16][seed % 2]) for seed in range(6))


@given(st.integers(0, 1 << 30), st.sampled_from([F32, BF16]))
@settings(max_examples=30, deadline=None)
def test_redistributes_within_one_process(seed, dtype):
    assert check_redistributes(Layout(), seed, dtype)


def test_writes_through_views_that_require_grad():
    base = torch.nn.Parameter(torch.zeros(4, 6))
    spec = TensorSpec("w", (4, 3), F32)
    want = Shard(spec, whole((4, 3)), base[:, ::2])
    have = Shard(spec, whole((4, 3)), torch.ones(4, 3))
    Transfer([have], [want], Layout()).run([have], [want])
    assert base.detach().sum() == 12
    assert base.detach()[:, 1::2].sum() == 0


def test_other_shards_than_planned_are_refused():
    spec = TensorSpec("w", (4,), F32)
    shards = [Shard(spec, whole((4,)), torch.zeros(4))]
    half = [Shard(spec, whole((4,)), torch.zeros(4, dtype=BF16))]
    transfer = Transfer(shards, shards, Layout())
    with pytest.raises(ValueError, match="not those"):
        transfer.run(half, shards)


def check_missing(layout):
    spec = TensorSpec("w", (4,), F32)
    have = [Shard(spec, Box((0,), (3,)), torch.zeros(3))] if layout.rank == 0 else []
    with pytest.raises(MissingError, match=r"tensor w"):
        Transfer(have, [Shard(spec, whole((4,)), torch.zeros(4))] if layout.rank else [], layout)
    return True


def test_every_rank_learns_that_something_is_missing():
    assert run_ranks(check_missing, 2) == [True, True]
