from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.models.kernels.attention import PackedLayout, Softmax
from burnish.models.kernels.ulysses import Ulysses, _repeats
from burnish.models.packing import TokenSharing
from burnish.models.scorer import attention_of_part

CPU = torch.device("cpu")
LENGTHS = (5, 1, 9, 2)
WIDTH = 8
COUNTS = st.integers(0, 40)


def deals(count: int, ranks: int, multiple: int) -> list[TokenSharing]:
    rows = -(-count // (ranks * multiple)) * multiple
    return [TokenSharing(rank, ranks, count, rows) for rank in range(ranks)]


@given(COUNTS, st.integers(1, 5), st.integers(1, 3))
def test_every_token_is_dealt_once(count: int, ranks: int, multiple: int) -> None:
    values = np.arange(1, count + 1)
    hands = [deal.mine(values) for deal in deals(count, ranks, multiple)]
    assert len({len(hand) for hand in hands}) == 1
    assert len(hands[0]) % multiple == 0
    assert sorted(v for hand in hands for v in hand if v) == list(values)
    deal = deals(count, ranks, multiple)[0]
    tokens = values - 1
    for token, owner, place in zip(tokens, deal.owner(tokens), deal.place(tokens), strict=True):
        assert hands[owner][place] == values[token]


def test_alone_nothing_is_divided() -> None:
    deal = TokenSharing.of(7)
    assert (deal.rank, deal.ranks, deal.rows) == (0, 1, 7)
    packing = PackedLayout.of(LENGTHS, CPU)
    assert attention_of_part(packing, deal) is packing


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "times"),
    [
        (8, 8, 4, 1),
        (8, 4, 2, 1),
        (8, 2, 2, 1),
        (8, 2, 4, 2),
        (8, 1, 8, 8),
        (12, 2, 3, 3),
        (12, 4, 6, 3),
    ],
)
def test_key_heads_are_repeated_as_little_as_possible(
    heads: int, key_heads: int, ranks: int, times: int
) -> None:
    assert _repeats(heads, key_heads, ranks) == times
    assert key_heads * times % ranks == 0
    assert heads % (key_heads * times) == 0


def inputs(heads: int, key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads * 10 + key_heads)
    total = sum(LENGTHS)
    return [
        torch.randn(1, count, total, WIDTH, generator=generator)
        for count in (heads, key_heads, key_heads, heads)
    ]


def attend_rank(layout: Layout, cases: list[tuple[int, int, int | None]]) -> list[list[Tensor]]:
    """For each case this rank's rows of the output and of the gradients of queries, keys and values, and its part of the sinks'."""
    group = Mesh.of(Layout(layout.rank, layout.world, sequence=layout.world), 1, CPU).sequence
    found = []
    for heads, key_heads, window in cases:
        deal = TokenSharing.of(sum(LENGTHS), group)
        packing = attention_of_part(PackedLayout.of(LENGTHS, CPU), deal)
        assert isinstance(packing, Ulysses)
        rows = torch.from_numpy(deal.mine(np.arange(sum(LENGTHS))))
        *parts, upstream = (part[:, :, rows] for part in inputs(heads, key_heads))
        for part in parts:
            part.requires_grad_()
        sinks = torch.arange(heads) / heads
        sinks.requires_grad_()
        output = packing.attend(0, parts, Softmax(0.3, window, sinks=sinks))
        own = len(range(deal.rank, deal.count, deal.ranks))
        output[:, :own].backward(upstream.transpose(1, 2)[:, :own])
        tensors = [output.detach().transpose(1, 2), *(part.grad for part in parts)]
        found.append([*(tensor[:, :, :own] for tensor in tensors), sinks.grad])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_attention_of_shared_tokens_is_that_of_one_rank(world: int) -> None:
    cases = [(6, 6, None), (6, 2, None), (6, 1, 4), (6, 3, 3)]
    ranks = run_ranks(attend_rank, world, cases)
    for number, (heads, key_heads, window) in enumerate(cases):
        *parts, upstream = inputs(heads, key_heads)
        for part in parts:
            part.requires_grad_()
        packing = PackedLayout.of(LENGTHS, CPU)
        sinks = torch.arange(heads) / heads
        sinks.requires_grad_()
        output = packing.attend(0, parts, Softmax(0.3, window, sinks=sinks))
        output.backward(upstream.transpose(1, 2))
        wanted = [output.detach().transpose(1, 2), *(part.grad for part in parts)]
        for kind, tensor in enumerate(wanted):
            for rank in range(world):
                found = ranks[rank][number][kind]
                torch.testing.assert_close(found, tensor[:, :, rank::world], msg=f"{kind}")
        torch.testing.assert_close(sum(rank[number][-1] for rank in ranks), sinks.grad)
