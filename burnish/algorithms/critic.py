"""PPO's critic: advantages from its values, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.algorithms.advantages import standardised
from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import check_finite
from burnish.algorithms.loss import Loss
from burnish.config.schema import AggregationKind
from burnish.records import Floats, MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats


@dataclass(frozen=True, slots=True)
class Estimates:
    """Per rollout, an fp32 array of its completion's tokens."""

    advantages: list[Floats]
    """Whitened over all tokens of the step."""
    returns: list[Floats]
    """The critic's targets: the advantage before whitening plus the value."""


def gae(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    values: Sequence[Floats],
    token_penalties: Sequence[Floats] | None,
    gamma: float,
    lam: float,
) -> Estimates:
    """Return generalized advantage estimates (arXiv 1506.02438, equations 11, 12 and 16).

        δ_t = r_t + γ V(s_{t+1}) - V(s_t)
        Â_t = Σ_{l ≥ 0} (γλ)^l δ_{t+l},    R_t = Â_t + V(s_t)

    `values[i][t]` is V(s_t), of the state in which token t was chosen. V is 0 behind the last token,
    even of a truncated completion. r_t is -`token_penalties[i][t]`, plus `rewards[i]` at the last
    token. Raises `BurnishError` for a reward that is not finite.
    """
    scores = np.asarray(rewards, dtype=np.float64)
    exact = [np.asarray(each, dtype=np.float64) for each in values]
    lengths = [len(each) for each in exact]
    penalties = token_penalties or [np.zeros(length, dtype=np.float32) for length in lengths]
    paid = [np.asarray(each, dtype=np.float64) for each in penalties]
    check_finite(scores - np.array([each.sum() for each in paid], dtype=np.float64))
    deltas = np.zeros((max(lengths, default=0), len(lengths)))  # from each rollout's last token
    for i, (value, penalty) in enumerate(zip(exact, paid, strict=True)):
        delta = gamma * np.append(value[1:], 0.0)[: len(value)] - value - penalty
        delta[-1:] += scores[i]
        deltas[: lengths[i], i] = delta[::-1]
    running = np.zeros(len(lengths))
    for row in deltas:
        row += gamma * lam * running
        running = row
    sums = [deltas[:length, i][::-1] for i, length in enumerate(lengths)]
    returns = [(a + v).astype(np.float32) for a, v in zip(sums, exact, strict=True)]
    flat = standardised(np.concatenate([np.zeros(0), *sums])).astype(np.float32)
    return Estimates(np.split(flat, np.cumsum(lengths)[:-1]) if lengths else [], returns)


def value_stats(values: Sequence[Floats], returns: Sequence[Floats]) -> Stats:
    """Return `values/mean`, `returns/mean` and `explained_var` over completion tokens.

    `explained_var` is 1 - Var(R - V) / Var(R), NaN for equal returns.
    """
    v, r = (np.concatenate([np.zeros(0), *each]) for each in (values, returns))
    if not len(v):
        return Stats()
    variance = float(r.var())
    return Stats(
        {
            "values/mean": Mean(float(v.sum()), len(v)),
            "returns/mean": Mean(float(r.sum()), len(r)),
            "explained_var": Mean(variance - float((r - v).var()), variance),
        }
    )


def value_loss_fn(kind: AggregationKind, clip: float | None, max_response_length: int) -> Loss:
    """Return PPO's value loss, clipped as in OpenAI's ppo2 (arXiv 2005.12729, section 3).

        ℓ_t = ½ max( (V_t - R_t)²,  (clip(V_t, V_old,t - `clip`, V_old,t + `clip`) - R_t)² )

    Without `clip` it is ½ (V_t - R_t)². Statistics: `vf_loss`, and the share of clipped tokens as
    `vf_clipfrac`. The loss raises `BurnishError` without returns, or without old values to clip.
    """

    def value_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        aggregate = aggregation(kind, micro, max_response_length)
        mask = micro.loss_mask
        returns = torch.where(mask, micro.given("returns"), 0.0)
        values = torch.where(mask, outputs.values, 0.0)
        losses = (values - returns).square() / 2
        held = torch.zeros_like(mask)
        if clip is not None:
            old = torch.where(mask, micro.given("old_values"), 0.0)
            moved = values - old
            clipped = (old + moved.clamp(-clip, clip) - returns).square() / 2
            held = (moved.abs() > clip) & (clipped > losses)  # and not by rounding
            losses = torch.maximum(losses, clipped)
        loss = aggregate(losses)
        return loss, Stats(
            vf_loss=aggregate.mean_of(loss), vf_clipfrac=Mean((held & mask).sum(), mask.sum())
        )

    return value_loss
