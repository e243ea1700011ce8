"""For tests of plans and transfers: layouts cut at random, and the tables that ranks would tell of them."""

from __future__ import annotations

import itertools

import torch

from burnish.boxes.box import Box, flat_range, subtract, whole
from burnish.boxes.pieces import PieceTable
from burnish.boxes.shards import TensorSpec

F32, BF16 = torch.float32, torch.bfloat16


def piece(name, shape, box, dtype):
    return TensorSpec(name, shape, dtype), box


def tables(ranks):
    return [PieceTable.of(pieces) for pieces in ranks]


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
                ranks[rng.randrange(world)].append(piece(name, shape, box, F32))
    return ranks
