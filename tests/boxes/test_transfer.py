"""Transfers against indexing the whole tensor."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.random_layouts import BF16, F32, random_layout
from support.nightly import draws
from support.ranks.processes import run_ranks

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.transfer import Transfer
from burnish.distributed.layout import Layout
from burnish.errors import MissingError

# Execution: every rank knows the whole tensors, holds parts of them, and asks for other parts.

SHAPES = {"a": (7, 5), "b": (), "c": (0, 3), "d": (300,), "e": (3, 4, 5)}


def whole_tensors(salt=0):
    return {
        name: (torch.arange(whole(shape).elements, dtype=F32) + 1000 * salt + i).reshape(shape) / 7
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def as_shards(pieces, tensors, dtype=F32):
    return [
        Shard(tensor, box, tensors[tensor.name][box.slices].to(dtype).clone())
        for tensor, box in pieces
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
@draws(30)
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
    with pytest.raises(ValueError, match="shards"):
        transfer.run(half, shards)


def check_missing(layout):
    spec = TensorSpec("w", (4,), F32)
    have = [Shard(spec, Box((0,), (3,)), torch.zeros(3))] if layout.rank == 0 else []
    with pytest.raises(MissingError, match=r"\bw\b"):
        Transfer(have, [Shard(spec, whole((4,)), torch.zeros(4))] if layout.rank else [], layout)
    return True


def test_every_rank_learns_that_something_is_missing():
    assert run_ranks(check_missing, 2) == [True, True]
