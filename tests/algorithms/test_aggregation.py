from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.algorithms.aggregation import (
    aggregation,
    loss_lengths,
    sequence_means,
    to_tokens,
)
from burnish.records import MicroBatch

KINDS = ["token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_fixed"]


def slow(kind: str, case, losses: list[float]) -> float:
    total = 0.0
    for tokens in case.sequences():
        if not tokens:
            continue
        summed = sum(losses[t] for t in tokens)
        if kind == "token_mean":
            total += summed / case.micro.num_tokens
        elif kind == "token_sum":
            total += summed
        elif kind == "sequence_mean":
            total += summed / len(tokens) / case.micro.num_sequences
        elif kind == "sequence_sum":
            total += summed / case.micro.num_sequences
        else:
            total += summed / 32 / case.micro.num_sequences
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_loop_over_sequences(kind: str, make_case) -> None:
    case = make_case()
    losses = case.outputs.logprobs.detach()
    got = aggregation(kind, case.micro, 32)(losses)
    np.testing.assert_allclose(got, slow(kind, case, losses.tolist()), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_coefficient_and_zero_at_masked_tokens(kind: str, make_case) -> None:
    case = make_case()
    losses = case.outputs.logprobs.detach().clone().requires_grad_()
    aggregate = aggregation(kind, case.micro, 32)
    aggregate(losses).backward()
    assert torch.equal(losses.grad, aggregate.coefficients)
    assert not losses.grad[~case.micro.loss_mask].any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_does_not_depend_on_the_cut(kind: str, make_case) -> None:
    case = make_case()
    whole = aggregation(kind, case.micro, 32)
    losses = torch.where(case.micro.loss_mask, case.outputs.logprobs.detach(), 0)
    parts, units = 0.0, 0
    for first, last in ((0, 1), (1, 4)):
        micro, tokens = cut(case.micro, first, last)
        part = aggregation(kind, micro, 32)
        parts += part(losses[tokens])
        units += part.local_units
    np.testing.assert_allclose(parts, whole(losses), rtol=1e-6)
    assert units == whole.local_units


def cut(micro: MicroBatch, first: int, last: int) -> tuple[MicroBatch, slice]:
    bounds = micro.cu_seqlens[first : last + 1]
    tokens = slice(int(bounds[0]), int(bounds[-1]))
    return replace(
        micro,
        cu_seqlens=bounds - bounds[0],
        loss_mask=micro.loss_mask[tokens],
    ), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_loss_tokens_is_zero_with_zero_gradient(kind: str, make_case) -> None:
    case = make_case(lengths=((3, 0), (2, 0)))
    micro = replace(case.micro, num_tokens=0, num_sequences=0)
    losses = case.outputs.logprobs
    loss = aggregation(kind, micro, 32)(losses)
    loss.backward()
    assert loss == 0
    assert not losses.grad.any()


def test_units_are_loss_tokens_or_sequences_that_have_any(make_case) -> None:
    micro = make_case().micro
    assert aggregation("token_mean", micro, 1).local_units == 15
    assert aggregation("sequence_mean", micro, 1).local_units == 3
    assert loss_lengths(micro).tolist() == [5, 1, 0, 9]


def test_sequence_means_and_back(make_case) -> None:
    case = make_case()
    means = sequence_means(case.outputs.logprobs.detach(), case.micro)
    values = case.outputs.logprobs.tolist()
    want = [np.mean([values[t] for t in tokens]) if tokens else 0 for tokens in case.sequences()]
    np.testing.assert_allclose(means, want, rtol=1e-6)
    spread = to_tokens(means, case.micro)
    bounds = case.micro.cu_seqlens.tolist()
    for s, mean in enumerate(means):
        assert (spread[bounds[s] : bounds[s + 1]] == mean).all()
