"""PPO's critic: advantages from its values, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.algorithms.advantages import pooled, token_sums, whitening
from burnish.algorithms.aggregation import aggregation
from burnish.algorithms.base import Array, Loss
from burnish.config.algorithm import AggregationKind
from burnish.records import Floats, MicroBatch, TokenOutputs
from burnish.records.samples import Turn
from burnish.tracking.stats import Mean, Stats


@dataclass(frozen=True, slots=True)
class Estimates:
    """Arrays [tokens], one per completion."""

    advantages: list[Array]
    """fp64, not whitened."""
    returns: list[Floats]
    """The critic's targets: the advantage plus the value."""

    @property
    def sums(self) -> Array:
        """[n, 6] `token_sums` of advantages and returns."""
        returns = token_sums(np.asarray(row, np.float64) for row in self.returns)
        return np.concatenate([token_sums(self.advantages), returns], axis=1)

    def whitened(self, sums: Array, lengths: npt.NDArray[np.int64]) -> tuple[Floats, list[Floats]]:
        """Whiten advantages: return the means of all N completions, from `sums` [N, 6], and this rank's arrays."""
        mean, scale = whitening(sums[:, :3], lengths)
        means = sums[:, 0] + sums[:, 1] / np.maximum(lengths, 1)
        own = [((row - mean) * scale).astype(np.float32) for row in self.advantages]
        return ((means - mean) * scale).astype(np.float32), own


def gae(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    values: Sequence[Floats],
    token_penalties: Sequence[Floats] | None,
    gamma: float,
    lam: float,
    turns: Sequence[Sequence[Turn]] | None = None,
) -> Estimates:
    """Return generalized advantage estimates (arXiv 1506.02438, equations 11, 12 and 16).

        δ_t = r_t + γ V(s_{t+1}) - V(s_t)
        Â_t = Σ_{l ≥ 0} (γλ)^l δ_{t+l},    R_t = Â_t + V(s_t)

    `values[i][t]` is V(s_t), of the state in which token t was chosen. V is 0 after the last token,
    even of a truncated completion. r_t is -`token_penalties[i][t]`, plus `rewards[i]` at the last
    token. In a conversation, the last token of each of the `turns[i]` has the turn's reward, and the last one what is left of `rewards[i]`. REINFORCE++ (arXiv 2501.03262) has V = 0 and γ = λ = 1.
    """
    exact_values = [np.asarray(row, dtype=np.float64) for row in values]
    lengths = [len(row) for row in exact_values]
    penalties = token_penalties or [np.zeros(length, dtype=np.float32) for length in lengths]
    deltas = np.zeros((max(lengths, default=0), len(lengths)))  # row 0: each rollout's last token
    for i, (value, penalty) in enumerate(zip(exact_values, penalties, strict=True)):
        delta = gamma * np.append(value[1:], 0.0)[: len(value)] - value - penalty
        delta[-1:] += rewards[i]
        if turns is not None and len(delta):
            ends = np.cumsum([turn.tokens for turn in turns[i]], dtype=np.int64) - 1
            paid = [turn.reward for turn in turns[i]]
            np.add.at(delta, np.maximum(ends, 0), paid)
            delta[-1] -= sum(paid)
        deltas[: lengths[i], i] = delta[::-1]
    running = np.zeros(len(lengths))
    for row in deltas:
        row += gamma * lam * running
        running = row
    sums = [deltas[:length, i][::-1] for i, length in enumerate(lengths)]
    returns = [(a + v).astype(np.float32) for a, v in zip(sums, exact_values, strict=True)]
    return Estimates(sums, returns)


def value_stats(sums: Array, lengths: npt.NDArray[np.int64]) -> Stats:
    """Return `values/mean`, `returns/mean` and `explained_var` over completion tokens, from `Estimates.sums`.

    `explained_var` is 1 - Var(R - V) / Var(R), NaN for equal returns.
    """
    count = int(lengths.sum())
    if not count:
        return Stats()
    above, error = pooled(sums[:, :3], lengths)
    mean, squares = pooled(sums[:, 3:], lengths)
    return Stats(
        {
            "values/mean": Mean((mean - above) * count, count),
            "returns/mean": Mean(mean * count, count),
            "explained_var": Mean((squares - error) / count, squares / count),
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
        cut = torch.zeros_like(mask)
        if clip is not None:
            old = torch.where(mask, micro.given("old_values"), 0.0)
            moved = values - old
            clipped = (old + moved.clamp(-clip, clip) - returns).square() / 2
            cut = (moved.abs() > clip) & (clipped > losses)  # the first term excludes rounding
            losses = torch.maximum(losses, clipped)
        loss = aggregate(losses)
        return loss, Stats(
            vf_loss=aggregate.mean_of(loss), vf_clipfrac=Mean((cut & mask).sum(), mask.sum())
        )

    return value_loss
