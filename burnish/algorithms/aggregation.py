"""Sum token losses with coefficients that are known before the loss.

Counts are the *global* batch's, so its division does not change the total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.config.algorithm import AggregationKind
from burnish.records import MicroBatch
from burnish.tracking.stats import Mean


@dataclass(frozen=True, slots=True, eq=False)
class Aggregation:
    """A micro-batch's part in the step's loss."""

    coefficients: Tensor
    """[T] fp32, the factor of each token's loss; 0 where the token is not trained on."""
    local_units: Tensor
    """0-d int64, this micro-batch's count of the units of the mean: loss tokens, or sequences with any."""
    global_units: int
    """The same count over the global batch."""

    def __call__(self, token_losses: Tensor) -> Tensor:
        """Return the micro-batch's part of the loss. Masked values, even NaN, have no effect."""
        # A masked NaN times 0 would be NaN, so it is replaced before the product.
        masked = token_losses.masked_fill(self.coefficients == 0, 0.0)
        return (masked * self.coefficients).sum()

    def mean_of(self, part: Tensor) -> Mean:
        """Return a part as a mean whose global value is the whole loss."""
        return Mean(part.detach() * self.global_units, self.local_units)


def aggregation(kind: AggregationKind, micro: MicroBatch, max_response_length: int) -> Aggregation:
    """Return the coefficients, for loss mask m_t and token losses ℓ_t.

    - token_mean (DAPO, arXiv 2503.14476, equation 8): Σ_s Σ_t m_t ℓ_t / (loss tokens)
    - token_sum: Σ_s Σ_t m_t ℓ_t
    - sequence_mean (GRPO, arXiv 2402.03300, equation 3): Σ_s (Σ_t m_t ℓ_t / Σ_t m_t) / (sequences)
    - sequence_sum (seq-mean-token-sum in verl): Σ_s (Σ_t m_t ℓ_t) / (sequences)
    - sequence_sum_fixed (Dr. GRPO, arXiv 2503.20783): sequence_sum / `max_response_length`

    Sequences without a loss token do not count.
    """
    lengths = loss_lengths(micro)
    if kind in ("token_mean", "token_sum"):
        local_units = lengths.sum()
        global_units = micro.num_tokens
    else:
        local_units = (lengths > 0).sum()
        global_units = micro.num_sequences
    if kind == "sequence_mean":
        per_sequence = 1.0 / lengths.clamp(min=1)
    else:
        factors = {"token_sum": max(global_units, 1), "sequence_sum_fixed": 1 / max_response_length}
        per_sequence = torch.full_like(lengths, factors.get(kind, 1.0), dtype=torch.float32)
    # Divided here and not after the sum: micro-batches and ranks then only add, and no rank needs the others' losses.
    per_token = to_tokens(per_sequence / max(global_units, 1), micro)
    return Aggregation(
        coefficients=torch.where(micro.loss_mask, per_token, 0.0),
        local_units=local_units,
        global_units=global_units,
    )


def to_tokens(per_sequence: Tensor, micro: MicroBatch) -> Tensor:
    """Give every token its sequence's value, [S] to [T]."""
    lengths = micro.cu_seqlens.diff()
    # `output_size` saves a wait for the device.
    return torch.repeat_interleave(per_sequence, lengths, output_size=micro.loss_mask.numel())


def loss_lengths(micro: MicroBatch) -> Tensor:
    """Count each sequence's loss tokens, [S] int64."""
    counts = torch.nn.functional.pad(micro.loss_mask.cumsum(0), (1, 0))
    return counts[micro.cu_seqlens.long()].diff()


def sequence_means(values: Tensor, micro: MicroBatch) -> Tensor:
    """Average `values` [T] over each sequence's loss tokens, [S]; 0 without any."""
    masked = torch.where(micro.loss_mask, values, 0.0)
    sums = torch.segment_reduce(masked, "sum", offsets=micro.cu_seqlens, unsafe=True)
    return sums / loss_lengths(micro).clamp(min=1)
