"""How losses of tokens become one number.

Every way is a weighted sum over tokens whose coefficients are known before the loss is: so each is
one vector of coefficients, and the policy term, the KL term and the entropy bonus share it. The
counts divided by are those of the *global* batch, so adding over micro-batches and ranks gives the
same loss however the batch was cut. Left out: the losses themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.records import MicroBatch
from burnish.tracking.stats import Mean

AggregationKind = Literal[
    "token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_fixed"
]
"""The ways, by their name in the configuration."""


@dataclass(frozen=True, slots=True, eq=False)
class Aggregation:
    """How this micro-batch's token losses enter the loss of the step."""

    coefficients: Tensor
    """[T] fp32, what each token's loss is multiplied by; 0 where the token is not trained on."""
    local_units: Tensor
    """0-d int64, what is averaged over, counted in this micro-batch: loss tokens or sequences with any."""
    global_units: int
    """The same count over the global batch."""

    def __call__(self, token_losses: Tensor) -> Tensor:
        """This micro-batch's part of the loss, a scalar. What masked tokens hold, NaN included, has no effect."""
        trained = self.coefficients != 0
        return (torch.where(trained, token_losses, 0.0) * self.coefficients).sum()

    def mean_of(self, part: Tensor) -> Mean:
        """A part of the loss, as returned above, as a mean whose value over the whole global batch is the term itself."""
        return Mean(part.detach() * self.global_units, self.local_units)


def aggregation(kind: AggregationKind, micro: MicroBatch, max_response_length: int) -> Aggregation:
    """The coefficients of one way of aggregating. m_t is the loss mask, ℓ_t a token's loss.

    - token_mean (DAPO, arXiv 2503.14476, equation 8): Σ_s Σ_t m_t ℓ_t / (loss tokens)
    - token_sum: Σ_s Σ_t m_t ℓ_t
    - sequence_mean (GRPO, arXiv 2402.03300, equation 3): Σ_s (Σ_t m_t ℓ_t / Σ_t m_t) / (sequences)
    - sequence_sum (seq-mean-token-sum in verl): Σ_s (Σ_t m_t ℓ_t) / (sequences)
    - sequence_sum_fixed (Dr. GRPO, arXiv 2503.20783): Σ_s (Σ_t m_t ℓ_t / `max_response_length`) / (sequences)

    Sequences without a loss token count nowhere.
    """
    lengths = loss_lengths(micro)
    if kind in ("token_mean", "token_sum"):
        local_units, global_units = lengths.sum(), micro.num_tokens
    else:
        local_units, global_units = (lengths > 0).sum(), micro.num_sequences
    if kind == "sequence_mean":
        per_sequence = 1.0 / lengths.clamp(min=1)
    else:
        factors = {"token_sum": max(global_units, 1), "sequence_sum_fixed": 1 / max_response_length}
        per_sequence = torch.full_like(lengths, factors.get(kind, 1.0), dtype=torch.float32)
    per_token = to_tokens(per_sequence / max(global_units, 1), micro)
    return Aggregation(
        coefficients=torch.where(micro.loss_mask, per_token, 0.0),
        local_units=local_units,
        global_units=global_units,
    )


def to_tokens(per_sequence: Tensor, micro: MicroBatch) -> Tensor:
    """[S] to [T]: every token gets its sequence's value."""
    lengths = micro.cu_seqlens.diff()
    # Given the size of the result, the device need not be asked for it.
    return torch.repeat_interleave(per_sequence, lengths, output_size=micro.loss_mask.numel())


def loss_lengths(micro: MicroBatch) -> Tensor:
    """[S] int64, the number of loss tokens of each sequence."""
    counts = torch.nn.functional.pad(micro.loss_mask.cumsum(0), (1, 0))
    return counts[micro.cu_seqlens.long()].diff()


def sequence_means(values: Tensor, micro: MicroBatch) -> Tensor:
    """[T] to [S]: the mean of `values` over each sequence's loss tokens; 0 where it has none."""
    masked = torch.where(micro.loss_mask, values, 0.0)
    sums = torch.segment_reduce(masked, "sum", offsets=micro.cu_seqlens, unsafe=True)
    return sums / loss_lengths(micro).clamp(min=1)
