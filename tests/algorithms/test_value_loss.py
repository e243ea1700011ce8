from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.algorithms.critic import value_loss_fn
from burnish.errors import BurnishError
from burnish.records import MicroBatch, TokenOutputs

KINDS = ["token_mean", "sequence_mean", "sequence_sum_fixed"]


def with_values(case) -> tuple[TokenOutputs, MicroBatch]:
    """Values, old values and returns; NaN where nothing is trained on."""
    rng, mask = np.random.default_rng(4), case.micro.loss_mask

    def tokens() -> torch.Tensor:
        numbers = torch.tensor(rng.normal(size=len(mask)), dtype=torch.float32)
        return torch.where(mask, numbers, torch.nan)

    micro = replace(case.micro, returns=tokens(), old_values=tokens())
    return TokenOutputs(values=tokens().requires_grad_()), micro


def slow(kind: str, clip: float | None, case, outputs: TokenOutputs, micro: MicroBatch):
    """The loss, and the share of tokens held, one token at a time."""
    total, held, count = 0.0, 0, 0
    values, old, returns = (
        t.detach().tolist() for t in (outputs.values, micro.old_values, micro.returns)
    )
    for tokens in case.sequences():
        summed = 0.0
        for t in tokens:
            loss = (values[t] - returns[t]) ** 2 / 2
            if clip is not None:
                near = min(max(values[t], old[t] - clip), old[t] + clip)
                clipped = (near - returns[t]) ** 2 / 2
                held += clipped > loss
                loss = max(loss, clipped)
            summed += loss
            count += 1
        if not tokens:
            continue
        if kind == "token_mean":
            total += summed / micro.num_tokens
        elif kind == "sequence_mean":
            total += summed / len(tokens) / micro.num_sequences
        else:
            total += summed / 32 / micro.num_sequences
    return total, held / count


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_slow_transcription(kind: str, clip: float | None, make_case) -> None:
    case = make_case()
    outputs, micro = with_values(case)
    loss, stats = value_loss_fn(kind, clip, 32)(outputs, micro)
    wanted, held = slow(kind, clip, case, outputs, micro)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5)
    numbers = stats.values_by_name()
    assert numbers["vf_clipfrac"] == pytest.approx(held)
    assert (held > 0) == (clip == 0.2)
    mine = stats["vf_loss"]  # this micro-batch's part of a mean over the global batch
    units = micro.num_tokens if kind == "token_mean" else micro.num_sequences
    assert float(mine.total) == pytest.approx(wanted * units, rel=1e-5)


def test_the_gradient_is_that_of_the_formula_and_stops_at_the_clip(make_case) -> None:
    outputs, micro = with_values(make_case())
    values, mask = outputs.values, micro.loss_mask
    value_loss_fn("token_mean", 0.2, 32)(outputs, micro)[0].backward()
    near = micro.old_values + (values.detach() - micro.old_values).clamp(-0.2, 0.2)
    plain, clipped = (values.detach() - micro.returns) ** 2, (near - micro.returns) ** 2
    wanted = torch.where(clipped > plain, 0.0, (values.detach() - micro.returns) / micro.num_tokens)
    torch.testing.assert_close(values.grad[mask], wanted[mask])
    assert not values.grad[~mask].any()
    assert (clipped > plain)[mask].any()


@pytest.mark.parametrize("missing", ["returns", "old_values"])
def test_what_is_missing_is_named(make_case, missing: str) -> None:
    outputs, micro = with_values(make_case())
    with pytest.raises(BurnishError, match=missing):
        value_loss_fn("token_mean", 0.2, 32)(outputs, replace(micro, **{missing: None}))


def test_without_a_clip_old_values_are_not_asked_for(make_case) -> None:
    outputs, micro = with_values(make_case())
    loss, _ = value_loss_fn("token_mean", None, 32)(outputs, replace(micro, old_values=None))
    assert torch.isfinite(loss)


def test_a_value_within_the_clip_is_not_held_back() -> None:
    """Of two squares that ought to be equal one is the larger by rounding, now and then."""
    returns, old, values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    micro = MicroBatch(
        input_ids=torch.zeros(1000, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1000], dtype=torch.int32),
        loss_mask=torch.ones(1000, dtype=torch.bool),
        num_tokens=1000,
        num_sequences=1,
        returns=returns,
        old_values=old,
    )
    _, stats = value_loss_fn("token_mean", 10.0, 1000)(TokenOutputs(values=values), micro)
    assert stats.values_by_name()["vf_clipfrac"] == 0
